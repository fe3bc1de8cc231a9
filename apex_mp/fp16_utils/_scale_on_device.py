"""The loss scale of an FP16_Optimizer on a device for which the host does not wait.

The scale is on the device, and each step updates it there. The `DynamicLossScaler` on the host
is updated when outcomes are read back, by the same rule and so with the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex_mp.core import forks
from apex_mp.core.step import readback
from apex_mp.core.step.device_scale import DeviceScale
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import DynamicLossScale


class ScaleOnDevice:
    """The loss scale on the device, which steps update there."""

    def __init__(self) -> None:
        self._scale: DeviceScale | None = None
        self._scaler: DynamicLossScaler | None = None  # whose scale that is
        self._synced: dict[str, Any] = {}  # its attributes as they agree with the device
        # Two tensors: gradients scaled by one may have to be rescaled to the other.
        self._copies: list[Tensor] = []
        self._is_stale = True
        self._is_captured = False  # a step, by a graph

    def scale(self, scaler: LossScaler | DynamicLossScaler, device: torch.device) -> float | Tensor:
        """Return the factor on the next loss: a number if it never changes, else 0-dim float32.

        The tensor keeps its value as long as gradients are scaled by it, and is the same object
        until the scale may have changed. A captured graph reads one tensor only: after a capture
        it is always that one, and `last_scale` holds its value before.
        """
        if not isinstance(scaler, DynamicLossScaler):
            return scaler.cur_scale
        live = self._live(scaler, device).scale
        if self._is_captured or readback.is_capturing():
            self._copies[1].copy_(self._copies[0])
            self._copies[0].copy_(live)
        elif self._is_stale:
            self._copies.reverse()
            self._copies[0].copy_(live)
        self._is_stale = False
        return self._copies[0]

    @property
    def last_scale(self) -> Tensor | None:
        """The value of the tensor of `scale` before it was written; None without a capture."""
        return self._copies[1] if self._copies and self._is_captured else None

    def for_step(
        self, scaler: LossScaler | DynamicLossScaler, device: torch.device
    ) -> DeviceScale | None:
        """Return the scale for a step that updates it; None if it never changes."""
        if not isinstance(scaler, DynamicLossScaler):
            return None
        self._is_stale = True
        return self._live(scaler, device)

    def _live(self, scaler: DynamicLossScaler, device: torch.device) -> DeviceScale:
        """Return the scale on the device, updated if the user has written to the scaler."""
        scale = self._scale
        if scale is not None and scale.device == device and self._agrees(scaler):
            return scale
        if readback.is_capturing():
            raise RuntimeError(
                "FP16_Optimizer: the loss scale was set, or never used, before this capture of a "
                "CUDA graph. Take one step outside of the capture first"
            )
        readback.wait()
        if scale is None or scale.device != device:
            scale = self._scale = DeviceScale(scaler.loss_scale_value, device)
            self._copies = [scale.scale.clone(), scale.scale.clone()]
        else:
            scale.assign(scaler.loss_scale_value)
        self._scaler, self._synced, self._is_stale = scaler, dict(vars(scaler)), True
        return scale

    def _agrees(self, scaler: LossScaler | DynamicLossScaler) -> bool:
        return scaler is self._scaler and vars(scaler) == self._synced

    def update(self, scaler: LossScaler | DynamicLossScaler, *, skipped: bool) -> None:
        """Update the scaler for a step that has updated the scale on the device.

        Values that the user wrote to the scaler after that step hold for the steps that follow.
        """
        if scaler is not self._scaler:
            scaler.update_scale(skipped)
            return
        written = {
            name: value for name, value in vars(scaler).items() if self._synced.get(name) != value
        }
        vars(scaler).update(self._synced)
        scaler.update_scale(skipped)
        self._synced = dict(vars(scaler))
        vars(scaler).update(written)

    def write_through(self, scaler: LossScaler | DynamicLossScaler) -> None:
        """Make replays of a captured graph use the values that were written to the scaler."""
        if self._is_captured and self._scale is not None and scaler is self._scaler:
            self._live(self._scaler, self._scale.device)

    def catch_up(self, scaler: LossScaler | DynamicLossScaler) -> None:
        """Update the scaler; the host waits.

        Raises:
            RuntimeError: This process was forked from the one that uses the GPU.
        """
        if self._scale is not None:
            forks.refuse_read("FP16_Optimizer: the loss scale", self._scale.device)
        readback.wait()
        if not self._is_captured or self._scale is None or not self._agrees(scaler):
            return
        value = self._scale.read()
        if isinstance(value, DynamicLossScale) and isinstance(scaler, DynamicLossScaler):
            scaler.cur_scale, scaler.overflows = value.scale, value.overflows
            scaler.last_overflow_iter = scaler.cur_iter - 1 - value.good_steps
            self._synced = dict(vars(scaler))

    def note_captured(self) -> None:
        """Note that a graph takes a step whenever it likes, and reads the scale where it is now."""
        self._is_captured = True
