"""Warnings of 16-bit parameters without masters: updates are lost, or eps is 0 in float16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.log import counted, warn
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.masters.store import has_master

_HALF_OF_THE_SMALLEST = 2.0**-25  # Below it a number is 0 in float16.
_NAMED = 3


def warn_of_lost_updates(
    optimizer: torch.optim.Optimizer, who: str, named: Iterable[tuple[str, Tensor]], advice: str
) -> None:
    """Warn if an optimizer steps 16-bit parameters that have no masters; call it once.

    Args:
        optimizer: The optimizer.
        who: The beginning of the warning.
        named: Its parameters and their names.
        advice: The end: how to get masters.
    """
    without = {
        id(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.dtype in LOW_PRECISION
        and param.requires_grad
        and not has_master(param, group, optimizer)
    }
    if not without:
        return
    found = [(name, param) for name, param in named if id(param) in without]
    dtypes = " and ".join(sorted({f"{param.dtype}".removeprefix("torch.") for _, param in found}))
    names = ", ".join([*(name for name, _ in found[:_NAMED]), *(["..."] * (len(found) > _NAMED))])
    warn(
        f"{who} steps {counted(len(found), 'parameter')} of {dtypes} that have no float32 masters: "
        f"{names}. An update of less than half the distance between two such numbers is lost. "
        f"{advice}",
        "updates-are-lost",
    )


def warn_of_eps(caller: str, optimizer: Any) -> None:
    """Warn of an optimizer that divides by float16 numbers plus an eps that is 0 in float16."""
    inner = getattr(optimizer, "optim", optimizer)  # LARC has it there.
    if hasattr(inner, "_own_masters"):  # FusedOptimizer, MasterWeights
        return
    for group in optimizer.param_groups:
        eps, is_fused = group.get("eps"), group.get("fused")
        is_zero = isinstance(eps, float) and 0.0 < eps < _HALF_OF_THE_SMALLEST
        if is_zero and not is_fused and any(p.dtype == torch.float16 for p in group["params"]):
            name = type(optimizer).__name__
            warn(
                f"{caller}: {name} steps parameters of float16 with eps={eps:g}, which is 0 in "
                "float16, so that it divides by 0 and weights become NaN. Use FusedAdam or another "
                "fused optimizer, which compute in float32, or eps=1e-4; "
                "apex_mp.optimizers.MasterWeights(optimizer), opt_level O2 and FP16_Optimizer step "
                "float32 masters",
                "nan-from-the-first-step",
            )
            return
