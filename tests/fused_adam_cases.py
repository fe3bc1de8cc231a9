"""Parameters, gradients and references that the tests of fused optimizers share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.amp import GradScaler

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAMES = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64"}

# A vector, a matrix, a scalar, one element, none, and more than a tile of the CPU kernels.
SHAPES = ((5,), (4, 3), (), (1,), (0, 3), (23, 29))

Optimizer = torch.optim.Optimizer


def make_params(
    device: torch.device, dtype: torch.dtype = F32, shapes: Iterable[Sequence[int]] = SHAPES
) -> list[Parameter]:
    """Return the same parameters at every call, of size 1 or so."""
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [Parameter(value.to(device, dtype)) for value in values]


def copies_of(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[Parameter]:
    return [Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def grad_for(param: Tensor, step: int, index: int, dtype: torch.dtype = F32) -> Tensor:
    """Return the gradient of a step: fp16 numbers, which every dtype but bf16 holds exactly."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    grad = torch.randn(param.shape, generator=generator).to(F16 if dtype != BF16 else BF16)
    return grad.to(param.device, dtype)


def give_grads(
    params: Iterable[Parameter],
    step: int,
    *,
    factor: float = 1.0,
    values: torch.dtype = F32,
    missing: Callable[[int, int], bool] = lambda step, index: False,
) -> None:
    """Set each `.grad`, in bf16 numbers if `values` says so; None where `missing(step, index)`."""
    for index, param in enumerate(params):
        if missing(step, index):
            param.grad = None
        else:
            param.grad = (grad_for(param, step, index, values) * factor).to(param.dtype)


def train(
    optimizer: Optimizer,
    params: Sequence[Parameter],
    steps: Iterable[int],
    *,
    after: Callable[[], object] = lambda: None,
    **how: Any,
) -> None:
    for step in steps:
        give_grads(params, step, **how)
        optimizer.step()
        after()


MOMENTS = ("exp_avg", "exp_avg_sq")


def assert_same_state(one: Optimizer, other: Optimizer) -> None:
    """Demand equal parameters, state and options, to the bit."""
    for group, other_group in zip(one.param_groups, other.param_groups, strict=True):
        assert options_of(group) == options_of(other_group)
        for param, wanted in zip(group["params"], other_group["params"], strict=True):
            assert_same_bits(param.detach(), wanted.detach())
            state = without_zeros(state_of(one, param))
            wanted_state = without_zeros(state_of(other, wanted))
            assert state.keys() == wanted_state.keys()
            for key, value in state.items():
                assert_same_bits(value, wanted_state[key])


def state_of(optimizer: Any, param: Tensor) -> dict[str, Any]:
    """Return the state of a parameter without the flag of a first step on a device."""
    state = optimizer.state.get(param, {})
    return {key: value for key, value in state.items() if key != "is_fresh"}


def without_zeros(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without zeros, which a skipped first step leaves, and are as good as none."""
    return {
        key: value
        for key, value in state.items()
        if not (torch.is_tensor(value) and not value.count_nonzero())
    }


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group, tensors as lists, so that they can be compared."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class Unchanged:
    """Demand, on leaving, that an optimizer's parameters, state, options and more are as before."""

    def __init__(self, optimizer: Optimizer, more: Collection[Tensor] = ()) -> None:
        self.optimizer, self.more = optimizer, more

    def __enter__(self) -> None:
        self.before = copy.deepcopy(self.optimizer)
        self.more_before = [tensor.detach().clone() for tensor in self.more]

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            assert len(self.optimizer.state) == len(self.before.state)
            assert_same_state(self.optimizer, self.before)
            for tensor, before in zip(self.more, self.more_before, strict=True):
                assert_same_bits(tensor.detach(), before)


OVERFLOWS = {0, 5, 6, 17, 30}


def make_scaler(
    device: torch.device, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.amp.GradScaler:
    """Return torch's scaler; ours for gradients that torch cannot unscale on the device."""
    options = {"init_scale": 2.0**10, "growth_interval": 4, **options}
    of_torch = device.type == "cpu" or dtype != torch.bfloat16
    scaler = (torch.amp.GradScaler if of_torch else GradScaler)(device.type, **options)
    scaler.scale(torch.zeros((), device=device))  # makes the scale, as the first loss does
    return scaler


def scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    params: list[Parameter],
    step: int,
    *,
    bad: float | None = None,
    unscale: bool = False,
    max_norm: float = 0.0,
) -> float:
    """Take a step with scaled gradients, one of them `bad`, and return the next scale."""
    give_grads(params, step, factor=scaler.get_scale(), values=BF16)
    if bad is not None:
        params[-1].grad.view(-1)[-1] = bad
    if unscale:
        scaler.unscale_(optimizer)
    if max_norm:
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()
