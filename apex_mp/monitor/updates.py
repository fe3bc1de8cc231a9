"""Updates that 16-bit weights lose, because they are less than half a unit in the last place."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.grads.in_host_memory import grad_here
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.masters.param_names import ParamNames
from apex_mp.masters.store import has_master


@dataclasses.dataclass(frozen=True)
class LostUpdates:
    """The effect of a step on a 16-bit parameter without a master.

    Attributes:
        name: Name of the parameter.
        lost: How many elements do not change although their update is not zero.
        updates: How many updates are not zero.
        total: How many elements there are.
    """

    name: str
    lost: int
    updates: int
    total: int


def lost_updates(
    optimizer: torch.optim.Optimizer,
    *,
    scale: float = 1.0,
    model: torch.nn.Module | None = None,
) -> list[LostUpdates]:
    """Count the updates that the next step would lose in 16-bit weights.

    Call it before `optimizer.step()`. A copy of the optimizer takes the step with copies of
    parameters, gradients and state in float64, and its weights are rounded. That takes the time of
    a step, and 8 bytes for each element of a parameter, its gradient and its state. The optimizer
    and the model are not changed.

    Args:
        optimizer: An optimizer with 16-bit parameters; those with masters lose nothing and are
            left out.
        scale: The divisor of the gradients: the loss scale, or 1 if they are unscaled [1].
        model: The module whose names are used [None: those of the groups, else group and index].

    Returns:
        One entry for each 16-bit parameter that has a gradient and no master.
    """
    if isinstance(optimizer, FP16_Optimizer):
        return []
    named = [*ParamNames(None, model).params(optimizer.param_groups)]
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    without_master = [
        (name, param)
        for name, param in named
        if param.dtype in LOW_PRECISION
        and grad_here(param) is not None
        and not has_master(param, group_of[id(param)], optimizer)
    ]
    if not without_master:
        return []
    wide = {id(param): _wide(param, scale) for _, param in named}
    memo: Any = dict(wide)
    twin = copy.deepcopy(optimizer, memo)
    for state in twin.state.values():
        for name, value in state.items():
            # Step counts are float32 in float64 optimizers, too.
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                state[name] = value.double()
    before = {key: param.detach().clone() for key, param in wide.items()}
    twin.step()
    return [
        _count(name, param, before[id(param)], wide[id(param)].detach())
        for name, param in without_master
    ]


def _wide(param: Tensor, scale: float) -> Parameter:
    copied = Parameter(param.detach().double(), requires_grad=param.requires_grad)
    grad = grad_here(param)
    if grad is not None:
        copied.grad = grad.detach().double() / scale
    return copied


def _count(name: str, param: Tensor, before: Tensor, after: Tensor) -> LostUpdates:
    moves = after != before
    stays = after.to(param.dtype) == param.detach()
    return LostUpdates(name, int((moves & stays).sum()), int(moves.sum()), param.numel())
