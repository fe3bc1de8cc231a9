"""Steps of an FP16_Optimizer on a device for which the host does not wait.

The loss scale is on the device, and each step updates it there. The `DynamicLossScaler` on the host
is updated when outcomes are read back, by the same rule and so with the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import forks, readback
from apex_mp.core.device_scale import DeviceScale
from apex_mp.core.log import logger, see
from apex_mp.core.step import Outcome, StepResult
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import DynamicLossScale

_LOG = logger("apex_mp.fp16_utils")


class DeviceSteps:
    """The loss scale on the device, and steps whose outcome the host does not know yet.

    Args:
        callback: A method, called with each step's outcome and result, in the order of the steps.
    """

    def __init__(self, callback: Callable[[Outcome, StepResult], None]) -> None:
        self._callback = callback
        self._scale: DeviceScale | None = None
        self._scaler: DynamicLossScaler | None = None  # whose scale that is
        self._synced: dict[str, Any] = {}  # its attributes as they agree with the device
        # Two tensors: gradients scaled by one may have to be rescaled to the other.
        self._copies: list[Tensor] = []
        self._is_stale = True
        self._captured: StepResult | None = None  # A graph takes this step whenever it likes.

    # The scale.

    def scale(self, scaler: LossScaler | DynamicLossScaler, device: torch.device) -> float | Tensor:
        """Return the factor on the next loss: a number if it never changes, else 0-dim float32.

        The tensor keeps its value as long as gradients are scaled by it, and is the same object
        until the scale may have changed. A captured graph reads one tensor only: after a capture
        it is always that one, and `last_scale` holds its value before.
        """
        if not isinstance(scaler, DynamicLossScaler):
            return scaler.cur_scale
        live = self._live(scaler, device).scale
        if self._captured is not None or readback.is_capturing():
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
        return self._copies[1] if self._copies and self._captured is not None else None

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
        if self._captured is not None and self._scale is not None and scaler is self._scaler:
            self._live(self._scaler, self._scale.device)

    def catch_up(self, scaler: LossScaler | DynamicLossScaler) -> None:
        """Update the scaler; the host waits.

        Raises:
            RuntimeError: This process was forked from the one that uses the GPU.
        """
        if self._scale is not None:
            forks.refuse_read("FP16_Optimizer: the loss scale", self._scale.device)
        readback.wait()
        if self._captured is None or self._scale is None or not self._agrees(scaler):
            return
        value = self._scale.read()
        if isinstance(value, DynamicLossScale) and isinstance(scaler, DynamicLossScaler):
            scaler.cur_scale, scaler.overflows = value.scale, value.overflows
            scaler.last_overflow_iter = scaler.cur_iter - 1 - value.good_steps
            self._synced = dict(vars(scaler))

    # Outcomes of steps.

    def submit(self, result: StepResult, *, verbose: bool) -> None:
        """Submit the readback of a step's outcome.

        If the optimizer no longer exists when it arrives, an overflow is logged if `verbose`.
        """
        sent, read = result.sent, result.read
        assert sent is not None  # Else its outcome is known.
        assert read is not None
        if readback.is_capturing():
            self._captured = result
            return
        weak_callback = weakref.WeakMethod(self._callback)

        def finish(arrived: Tensor) -> None:
            method = weak_callback()
            if method is not None:
                method(read(arrived), result)
            elif verbose and read(arrived).found_inf:
                _LOG.warning(
                    "FP16_Optimizer: a gradient overflowed and its step was skipped, which the "
                    "device reported after the optimizer was deleted"
                    + see("results-that-were-lost")
                )

        readback.submit_tensor(sent, finish)

    def captured_overflow(self) -> bool | None:
        """Whether the last step of a captured graph was skipped; None if none was captured."""
        result = self._captured
        if result is None or result.sent is None or result.read is None:
            return None
        return result.read(result.sent.cpu()).found_inf
