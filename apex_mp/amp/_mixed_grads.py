"""Detects gradients that are unscaled in part: a backward after `unscale_`, before `update`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex_mp import _C


class UnscaledGrads:
    """An optimizer's gradients after they were unscaled, until `update`.

    Args:
        params: Those of the optimizer.

    Attributes:
        are_mixed: Whether a backward of a scaled loss has added to them, or made new ones.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.are_mixed = False
        self._params = params
        self._versions = _C.GradVersions()

    def watch_backward(self) -> None:
        """Compare gradients before and after the backward that is running."""
        self._versions.record(self._params)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _end(self) -> None:
        self.are_mixed = self.are_mixed or self._versions.changed(self._params)

    def check(self, caller: str, owner: str) -> None:
        """Raise a RuntimeError if gradients are mixed."""
        if not self.are_mixed:
            return
        raise RuntimeError(
            f"GradScaler.{caller}: the gradients of {owner} were unscaled, and then a backward() "
            "of another scaled loss has added to them or made new ones. Unscale and clip after the "
            "last backward() of an iteration, and call scaler.update() at its end, also if the "
            "step is left out"
        )
