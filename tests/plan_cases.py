"""What the tests of the step plan share: a FusedAdam each of whose steps is checked.

A plan may only remember what it compares before it believes it. So each step of a `Run` is compared
with the one that a copy of the optimizer takes, whose plan has seen nothing (to the bit), and with
`reference.Adam` in float64.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import reference
import torch
from fused_adam_cases import BF16, F16, F32, F64, MOMENTS, assert_same_state
from tolerances import TOLERANCES, TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.masters.joined import differ
from apex_mp.optimizers import FusedAdam

# A matrix, a scalar, four dimensions for channels_last, none, and more than a tile of the kernels.
SHAPES = ((5,), (4, 3), (), (2, 3, 4, 5), (0, 3), (29, 23))
# A product of a clip's norm, summed in float32, is a little further off than one operator.
_TOLERANCES = {**TOLERANCES, **TRAJECTORY_TOLERANCES}
_OPTIONS = ("weight_decay", "eps", "adam_w_mode", "bias_correction", "eps_inside_sqrt")

MakeGrad = Callable[[Tensor, int, int], Tensor | None]


def parameter(*shape: int, dtype: torch.dtype = F32) -> Parameter:
    return Parameter(torch.randn(shape, dtype=F64).to(dtype))


def fresh_grad(param: Tensor, step: int, index: int) -> Tensor:
    """Return another gradient at each step, of the parameter's dtype and layout."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    values = torch.randn(param.shape, generator=generator, dtype=F64)
    return torch.empty_like(param, requires_grad=False).copy_(values)


def params_of(optimizer: Any) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def has_master(param: Tensor, group: dict[str, Any]) -> bool:
    return group["master_weights"] and param.dtype in (F16, BF16)


@dataclasses.dataclass
class Run:
    """An optimizer in training, each step checked.

    Attributes:
        make_grad: Makes the gradient of a parameter at a step, or None.
        by_list: Gradients are arguments of the step instead of `.grad`.
    """

    optimizer: FusedAdam
    make_grad: MakeGrad = fresh_grad
    by_list: bool = False
    steps_taken: int = 0

    @property
    def params(self) -> list[Parameter]:
        return params_of(self.optimizer)

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def listed(self) -> list[Parameter]:
        """The first group's own list of parameters."""
        params: list[Parameter] = self.group["params"]
        return params

    def train(self, steps: int) -> None:
        for _ in range(steps):
            grads = [
                self.make_grad(param, self.steps_taken, index)
                for index, param in enumerate(self.params)
            ]
            self.step(grads)

    def step(self, grads: list[Tensor | None]) -> None:
        self.steps_taken += 1
        twin = copy.deepcopy(self.optimizer)
        before = [param.detach().clone() for param in self.params]
        grads_before = [None if grad is None else grad.clone() for grad in grads]
        expected = list(_predictions(self.optimizer, grads))
        for optimizer in (self.optimizer, twin):
            _take_step(optimizer, grads, self.by_list)
        assert_same_state(self.optimizer, twin)
        assert len(self.optimizer.state) == len(twin.state)
        for grad, grad_before in zip(grads, grads_before, strict=True):
            if grad is not None and grad_before is not None:
                assert_same_bits(grad, grad_before)
        for param, old, wanted in zip(self.params, before, expected, strict=True):
            if wanted is None:
                assert_same_bits(param.detach(), old)
            else:
                _assert_as_predicted(self.optimizer, param, wanted)


def _take_step(optimizer: FusedAdam, grads: list[Tensor | None], by_list: bool) -> None:
    params = params_of(optimizer)
    if by_list:
        for param in params:
            param.grad = None
        rest = iter(grads)
        optimizer.step(grads=[[next(rest) for _ in g["params"]] for g in optimizer.param_groups])
        return
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


def _predictions(
    optimizer: FusedAdam, grads: list[Tensor | None]
) -> Iterator[reference.Adam | None]:
    rest = iter(grads)
    optimizer._own_masters.put_back(optimizer)  # What was in no group.
    for group in optimizer.param_groups:
        group_grads = [next(rest) for _ in group["params"]]
        norm = reference.l2_norm([grad for grad in group_grads if grad is not None])
        limit = group["max_grad_norm"]
        divisor = max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0
        for param, grad in zip(group["params"], group_grads, strict=True):
            if grad is None:
                yield None
                continue
            state = optimizer.state.get(param) or {}
            start = optimizer.master(param) if has_master(param, group) else param.detach()
            zeros = torch.zeros_like(param, dtype=F64)
            moments = [state.get(key, zeros) for key in MOMENTS]
            model = reference.Adam(start, *moments, step=float(state.get("step", 0.0)))
            model.update(
                grad,
                lr=lr.item() if isinstance(lr := group["lr"], Tensor) else float(lr),
                inv_scale=(-1.0 if group["maximize"] else 1.0) / divisor,
                betas=group["betas"],
                **{name: group[name] for name in _OPTIONS},
            )
            yield model


def _assert_as_predicted(optimizer: FusedAdam, param: Parameter, wanted: reference.Adam) -> None:
    state = optimizer.state[param]
    stepped = param.detach()
    if any(has_master(param, g) for g in optimizer.param_groups if _holds(g["params"], param)):
        stepped = optimizer.master(param)
        assert not differ(stepped, param).any()
    assert float(state["step"]) == wanted.step
    assert_near(stepped, wanted.param, _TOLERANCES[stepped.dtype])
    assert_near(state["exp_avg"], wanted.exp_avg, _TOLERANCES[F32])
    assert_near(state["exp_avg_sq"], wanted.exp_avg_sq, _TOLERANCES[F32])


def _holds(params: list[Parameter], param: Parameter) -> bool:
    return any(one is param for one in params)


# Kinds of optimizers: how many groups, the dtypes that parameters have in turns, and the options.
KINDS: dict[str, tuple[int, tuple[torch.dtype, ...], dict[str, Any]]] = {
    "fp32": (1, (F32,), {}),
    "bf16 with masters": (1, (BF16,), {"master_weights": True, "max_grad_norm": 1.0}),
    "two groups, mixed": (2, (F16, F32, BF16, F64), {"master_weights": True}),
}


def make_run(kind: str) -> Run:
    groups, dtypes, options = KINDS[kind]
    params: list[list[Parameter]] = [[] for _ in range(groups)]
    for index, shape in enumerate(SHAPES * groups):
        dtype = dtypes[index % len(dtypes)]
        params[index // len(SHAPES)].append(parameter(*shape, dtype=dtype))
    lrs = [0.05, 0.01]
    return Run(
        FusedAdam(
            [{"params": one, "lr": lr} for one, lr in zip(params, lrs[:groups], strict=True)],
            weight_decay=0.1,
            **options,
        )
    )


def parameter_at(address: int, values: Tensor) -> Parameter:
    """Return a new parameter: of a thousand one at this address, if CPython gives it out again."""
    made = [Parameter(values) for _ in range(1000)]
    return next((each for each in made if id(each) == address), made[0])
