"""Clipping that a fused step does in its own pass; until then gradients stay scaled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from apex_mp import _C
from apex_mp.core.grads.found_inf import clip_divisor


class FoldedClip:
    """A divisor, beside the loss scale, by which an optimizer's next step clips its gradients.

    Until that step the optimizer can only be stepped through the scaler.

    Args:
        optimizer: Owner of the gradients.
        norm: Norm of the unscaled gradients: 0-dim.
        max_norm: Gradients of a larger norm are scaled down to this one.
        found_inf: For an optimizer that clips by itself, one number that is not 0 if gradients hold
            inf or NaN [None].

    Attributes:
        norm: As given; likewise `max_norm` and `found_inf`.
        scale: By which the step that was checked divides; None: none was.
        is_late: Whether `update` came before the step.
        is_replayed: Whether it did, and replays of a CUDA graph write gradients, whose versions do
            not show that they are new.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        norm: Tensor,
        max_norm: float,
        found_inf: Tensor | None = None,
    ) -> None:
        self.norm, self.max_norm, self.found_inf = norm, max_norm, found_inf
        self.scale: float | Tensor | None = None
        self.is_late = self.is_replayed = False
        self._is_stepping = False
        self._versions = _C.GradVersions()
        self._versions.record(params_of(optimizer))
        self._is_pending = False
        self._guard: RemovableHandle | None = None

    @functools.cached_property
    def divisor(self) -> Tensor:
        """By what gradients are to be divided beside the loss scale: 0-dim float32."""
        return clip_divisor(self.norm, self.max_norm).float()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse steps without the scaler; call it once the scaler has the clip."""
        self._guard = optimizer.register_step_pre_hook(self._refuse_plain_step)
        # Last: if Ctrl-C interrupts the line above, the hook that is left behind refuses nothing.
        self._is_pending = True

    def close(self) -> None:
        """Let the optimizer be stepped without the scaler again."""
        self._is_pending = False
        if self._guard is not None:
            self._guard.remove()

    def is_obsolete(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether no step used it and the gradients have changed since."""
        return self.is_late and self._versions.changed(params_of(optimizer))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise a RuntimeError if gradients have changed since the clip, or `update` was called."""
        owner = type(optimizer).__name__
        if self.is_late:
            raise RuntimeError(
                f"GradScaler: scaler.update() was called between scaler.clip_grad_norm_(optimizer) "
                f"and the step of {owner}, whose gradients have the scale of before. Call "
                "clip_grad_norm_, step and update in this order"
            )
        if self._versions.changed(params_of(optimizer)):
            raise RuntimeError(
                f"GradScaler: gradients of {owner} were written or replaced after "
                "scaler.clip_grad_norm_(optimizer), which has measured them and left them scaled. "
                "Call it after the last backward(); to edit gradients, call "
                "scaler.unscale_(optimizer) before it; to leave out a step, call scaler.update()"
            )

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which the scaler steps or unscales; the clip is dropped when it ends."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
        self.close()

    def _refuse_plain_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_pending or self._is_stepping or self.is_obsolete(optimizer):
            return
        owner = type(optimizer).__name__
        raise RuntimeError(
            f"{owner}.step: the gradients are still scaled, because "
            "scaler.clip_grad_norm_(optimizer) leaves it to the step to unscale and clip them. "
            "Call scaler.step(optimizer) instead of optimizer.step()"
        )


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]
