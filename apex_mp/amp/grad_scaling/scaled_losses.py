"""Warnings about the losses of `GradScaler.scale`: float16 ones, and steps without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex_mp.amp.grad_scaling.folded_clip import params_of
from apex_mp.core.log import warn
from apex_mp.core.step import readback

_LARGEST = torch.finfo(torch.float16).max


class ScaledLosses:
    """Whether a loss was scaled since the last update; warns once of each mistake."""

    def __init__(self) -> None:
        self._is_scaled = False
        self._is_in_graph = False  # A replay of a CUDA graph scales without a call.
        self._has_seen_float16 = self._has_warned = False

    def take(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """Note a loss that is scaled; warn if it is float16 and its gradient would be inf."""
        self._is_scaled = True
        if readback.is_capturing():
            self._is_in_graph = True
            return
        if self._has_seen_float16 or not _holds_float16(outputs):
            return
        self._has_seen_float16 = True
        scale = scaler.get_scale()
        if scale > _LARGEST:
            warn(
                f"GradScaler.scale: the loss is float16 and the scale is {scale:g}, which is inf "
                f"in float16, and so is the gradient of the loss: steps are skipped until the "
                "scale is 32768. Compute the loss in float32, of outputs.float() (loss.float() "
                "comes too late), or take GradScaler(init_scale=2.0**15, max_scale=2.0**15)",
                "a-float16-loss",
            )

    def check(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Warn if gradients are unscaled although no loss was scaled."""
        if self._is_scaled or self._is_in_graph or self._has_warned:
            return
        if scaler._scale is None or readback.is_capturing():
            return  # torch raises an error if there was never a loss.
        if any(param.grad is not None for param in params_of(optimizer)):
            self._has_warned = True
            warn(
                "GradScaler.step: scaler.scale(loss) was not called since the last "
                f"scaler.update(), but the gradients of {type(optimizer).__name__} are divided by "
                f"the scale, {scaler.get_scale():g}. Call scaler.scale(loss).backward() in each "
                "iteration, and scaler.update() once at its end",
                "gradients-that-were-not-scaled",
            )

    def are_replayed(self) -> bool:
        """Return whether a CUDA graph scales them, so that gradients are new without a call."""
        return self._is_in_graph

    def forget(self) -> None:
        """Begin a new iteration."""
        self._is_scaled = False


def _holds_float16(outputs: Any) -> bool:
    # Another iterable may be one that can be read once.
    several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return any(isinstance(each, Tensor) and each.dtype == torch.float16 for each in several)
