"""A warning of optimizers whose eps is 0 in float16."""

from __future__ import annotations

from typing import Any

import torch

from apex_mp.core.log import warn
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers.master_weights import MasterWeights

_HALF_OF_THE_SMALLEST = 2.0**-25  # Below it a number is 0 in float16.


def warn_of_eps(caller: str, optimizer: Any) -> None:
    """Warn of an optimizer that adds eps to float16 numbers and divides by them, if eps is 0 there.

    Args:
        caller: The class or function, for the message.
        optimizer: Any object with param_groups. Fused optimizers, ours and torch's, and those in
            MasterWeights divide in float32.
    """
    inner = getattr(optimizer, "optim", optimizer)  # LARC has it there.
    if isinstance(inner, (FusedOptimizer, MasterWeights)):
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
