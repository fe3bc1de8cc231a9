"""`.grad` of a parameter whose gradient is elsewhere: in host memory, by `offload="gradients"`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_MARK = "_is_in_host_memory"


def mark_like(param: Tensor) -> Tensor:
    """Return a `.grad` that says so: NaN of stride 0, so that writing to it raises."""
    nan = torch.full((), math.nan, dtype=param.dtype, device=param.device)
    mark = nan.expand(param.shape)
    setattr(mark, _MARK, True)
    return mark


def is_mark(grad: Tensor | None) -> bool:
    """Return whether a `.grad` is such a mark."""
    return hasattr(grad, _MARK)


def grad_here(param: Tensor) -> Tensor | None:
    """Return a parameter's gradient; None if there is none, or it is elsewhere."""
    grad = param.grad
    return None if is_mark(grad) else grad


def refuse_offloaded(caller: str, optimizer: Any) -> None:
    """Raise a ValueError if an optimizer takes gradients out of `.grad`, where `caller` needs them.

    Args:
        caller: The class or function, for the message.
        optimizer: Any object.
    """
    if getattr(optimizer, "offload", False) == "gradients":
        raise ValueError(
            f'{caller}: offload of this {type(optimizer).__name__} is "gradients", so that they '
            f"are not in .grad, where {caller} works on them; it must be True or False. "
            "apex_mp.amp.GradScaler's step and clip_grad_norm_ work with it"
        )
