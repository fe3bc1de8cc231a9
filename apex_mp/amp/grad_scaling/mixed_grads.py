"""Detects gradients that are unscaled in part, or scaled by two scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.core.log import warn
from apex_mp.core.step import readback


class UnscaledGrads:
    """An optimizer's gradients after they were unscaled, until `update`.

    Args:
        params: The parameters of the optimizer.

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
        _after_backward(self._end)

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


class WaitingGrads:
    """Scaled gradients that an optimizer had not stepped with when `update` was called.

    Args:
        params: The parameters of the optimizer.
        scale: The loss scale before the update, 0-dim; it is copied.
    """

    @torch.no_grad()  # Gradients may have a graph.
    def __init__(self, params: list[Tensor], scale: Tensor) -> None:
        self._params = [param for param in params if param.grad is not None]
        self._are_added_to, self.are_kept = False, True
        grads = [tensors.local_part(param.grad) for param in self._params]  # type: ignore[arg-type]
        readable = [each for each in grads if each.numel() and tensors.not_readable(each) is None]
        # Loops that clear gradients to zero leave nothing of another scale.
        sizes = torch._foreach_norm(readable, math.inf) if readable else []
        largest = [tensors.copy_async(size.float(), scale.device) for size in sizes]
        # The scale, and the largest gradient; of gradients that cannot be read, the scale again.
        self._before = torch.stack([scale, torch.stack(largest or [scale]).amax()])
        self._versions = _C.GradVersions()
        self._versions.record(self._params)

    def watch_backward(self) -> None:
        """Notice whether the backward that is running adds to them."""
        # What has changed in between was cleared, or is the user's own.
        is_cleared = any(param.grad is None for param in self._params)
        if is_cleared or self._versions.changed(self._params):
            self.are_kept = False
        if self.are_kept:
            _after_backward(self._end)

    def _end(self) -> None:
        if self._versions.changed(self._params):
            self._are_added_to = True
            self._versions.record(self._params)

    def check(self, owner: str, scale: Tensor) -> None:
        """Warn if gradients of another scale were added; on a GPU the warning comes later.

        Args:
            owner: The optimizer's class.
            scale: By which the step divides.
        """
        if not (self.are_kept and self._are_added_to) or readback.is_capturing():
            return
        facts = torch.cat([self._before, tensors.copy_async(scale, self._before.device).view(1)])
        if facts.is_cpu:
            _warn_of_scales(owner, facts)
        else:
            readback.submit_tensor(facts, lambda arrived: _warn_of_scales(owner, arrived))


def _after_backward(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward that is running."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _warn_of_scales(owner: str, facts: Tensor) -> None:
    before, largest_grad, now = facts.tolist()
    if before != now and largest_grad != 0.0:
        warn(
            f"GradScaler.step: gradients of {owner} are sums of two scales: scaler.update() "
            f"changed {before:g} to {now:g} between their backwards, and the step divides by the "
            f"last. Call update() when each optimizer has stepped, or give {owner} a GradScaler "
            "of its own",
            "gradients-of-two-scales",
        )
