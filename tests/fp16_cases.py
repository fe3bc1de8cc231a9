"""What the tests of FP16_Optimizer share: losses with known gradients, optimizers, snapshots.

`pull((p, g), ...)` is a loss whose gradient by `p` is exactly `g`. With the optimizers of `PROBES`,
whose beta1 is 0, `exp_avg` is exactly the gradient that a step used; of FusedSGD, whose momentum is
0 in float32, the momentum buffer is. The two together say what FP16_Optimizer does to gradients
without any rounding in between, at scales that are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apex_mp import fp16_utils, optimizers
from apex_mp.optimizers import FusedAdam, FusedSGD

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

FACES = {
    "fp16_utils": fp16_utils.FP16_Optimizer,
    "optimizers": optimizers.FP16_Optimizer,
}
# The fused ones are given scaled gradients and make masters' `.grad` on demand; torch's are not.
PROBES: dict[str, Callable[..., Any]] = {
    "fused": lambda params, **more: FusedAdam(params, betas=(0.0, 0.999), **more),
    "fused sgd": lambda params, **more: FusedSGD(params, **{"lr": 0.1, "momentum": 1e-60, **more}),
    "plain": lambda params, **more: torch.optim.AdamW(params, betas=(0.0, 0.999), **more),
}

faces = pytest.mark.parametrize("face", FACES.values(), ids=FACES.keys())
probes = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())


def wrap(inner: Any, face: Any = fp16_utils.FP16_Optimizer, **more: Any) -> Any:
    """Return an FP16_Optimizer, silent and with a loss scale of 128 by default."""
    return face(inner, **{"static_loss_scale": 128.0, "verbose": False, **more})


def parameter(
    values: Any, dtype: torch.dtype = F16, device: torch.device | str = "cpu"
) -> Parameter:
    return Parameter(torch.as_tensor(values, dtype=dtype, device=device).clone())


def ones(*shape: int, dtype: torch.dtype = F16, device: torch.device | str = "cpu") -> Parameter:
    return Parameter(torch.ones(shape, dtype=dtype, device=device))


def pull(*pairs: tuple[Parameter, Any]) -> Tensor:
    """Return a loss whose gradient by each parameter is what is paired with it."""
    terms = [
        (param.double() * torch.as_tensor(grad, dtype=F64, device=param.device)).sum()
        for param, grad in pairs
    ]
    return torch.stack(terms).sum().float()


def grads_used(optimizer: Any) -> list[Tensor | None]:
    """Return what the only step of a probe used, by parameter; None for those it left out."""
    return [
        _gradient_in(optimizer.state[param]).cpu() if optimizer.state.get(param) else None
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def _gradient_in(state: dict[str, Tensor]) -> Tensor:
    return state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]


def master_grads(optimizer: Any) -> list[Tensor | None]:
    """Return copies of the `.grad` that param_groups show."""
    return [
        None if param.grad is None else param.grad.detach().cpu().clone()
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def assert_grads(actual: Iterable[Tensor | None], *expected: Any) -> None:
    """Compare exactly; a number stands for a tensor full of it, None for no gradient."""
    actual = list(actual)
    assert len(actual) == len(expected)
    for index, (ours, wanted) in enumerate(zip(actual, expected, strict=True)):
        if wanted is None or ours is None:
            assert ours is wanted, f"gradient {index} is {ours}, expected {wanted}"
            continue
        wanted = torch.as_tensor(wanted, dtype=ours.dtype).cpu().expand_as(ours)
        assert torch.equal(ours.cpu(), wanted), f"gradient {index} is {ours}, expected {wanted}"


def everything(optimizer: Any, *more: Tensor) -> list[Tensor]:
    """Return copies of all that a step may write: model, masters, state, and the tensors given."""
    tensors = [*optimizer.all_fp16_params, *more]
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param) or {}
            # Flags of FusedSGD are there while the host does not know what they say.
            leaves = tree_leaves([state[key] for key in sorted(state) if key != "is_fresh"])
            entries = [torch.as_tensor(leaf) for leaf in leaves if leaf is not None]
            # Zeros are as good as none: a skipped first step leaves them.
            tensors += [param, *(entry for entry in entries if entry.count_nonzero())]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Demand equal bits."""
    assert len(actual) == len(expected)
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), f"tensor {index} is {ours}, expected {theirs}"


def differ(actual: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(actual, expected, strict=False)
    return len(actual) != len(expected) or any(not torch.equal(a, b) for a, b in pairs)


class BackwardError(Exception):
    pass


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BackwardError


def raise_in_backward(x: Tensor) -> Tensor:
    return _RaiseInBackward.apply(x)


# The first step makes the state; weights are looked at before and after steps 1, 2, 4, 8, ...
STEPS_TO_COUNT_PASSES = 6


class _Passes(TorchDispatchMode):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        large = any(leaf.numel() >= self.elements for leaf in leaves)
        if large and not _is_view(func):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


@contextmanager
def passes_over(elements: int) -> Iterator[list[str]]:
    """List the names of operators that read or write a tensor of that many elements or more.

    And those of a step plan's passes, behind them, whatever their size.
    """
    with torch.profiler.profile() as profiler, _Passes(elements) as passes:
        yield passes.names
    events = [event.name for event in profiler.events()]
    passes.names += [name for name in events if name.startswith("apex_mp::") and "_pass" in name]
