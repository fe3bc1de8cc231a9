"""What the tests of apex_mp.amp.GradScaler share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from fused_adam_cases import give_grads
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

Optimizer = torch.optim.Optimizer

OURS: dict[str, Any] = {
    "FusedAdam": functools.partial(FusedAdam, lr=0.01, weight_decay=0.1),
    "FusedSGD": functools.partial(FusedSGD, lr=0.01, momentum=0.9),
    "FusedAdagrad": functools.partial(FusedAdagrad, lr=0.01),
    "FusedNovoGrad": functools.partial(FusedNovoGrad, lr=0.01),
    "FusedLAMB": functools.partial(FusedLAMB, lr=0.01, max_grad_norm=0.0),
}
OF_TORCH: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def new_scaler(device: torch.device, cls: Any = amp.GradScaler, **options: Any) -> Any:
    """Return a scaler that has its scale already, as after the first loss."""
    scaler = cls(device.type, **{"init_scale": 2.0**10, "growth_interval": 4, **options})
    scaler.scale(torch.zeros((), device=device))
    return scaler


def give_scaled(
    scaler: Any, params: list[Parameter], step: int, bad: float | None = None, **how: Any
) -> None:
    """Give parameters the gradients of a scaled loss; `bad` is one number of them."""
    scaler.scale(torch.zeros((), device=params[0].device))
    give_grads(params, step, factor=scaler.get_scale(), **how)
    if bad is not None:
        grad = params[-1].grad
        assert grad is not None
        grad.view(-1)[-1] = bad
