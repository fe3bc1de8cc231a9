"""The loss scale on the device of the gradients, so that the host waits for no device.

The host reads an overflow back later; see `apex_mp.core.step.readback`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import forks, ops
from apex_mp.core.step import readback
from apex_mp.loss_scale import DynamicLossScale, StaticLossScale

# Where a scale may live. The host never waits for a CPU.
DEVICE_TYPES = {"cuda"}


class DeviceScale:
    """A loss scale and its state on a device.

    Args:
        value: The initial scale.
        device: The device.

    Attributes:
        scale: 0-dim float32; `update`, or the step, writes it.
        device: The device.
    """

    def __init__(self, value: DynamicLossScale | StaticLossScale, device: torch.device) -> None:
        self._value = value
        self.device = device
        counts = (0, 0)
        if isinstance(value, DynamicLossScale):
            counts = value.good_steps, value.overflows
        self.scale = torch.full((), value.scale, dtype=torch.float32, device=device)
        self._good_steps, self._overflows = (
            torch.full((), count, dtype=torch.int32, device=device) for count in counts
        )

    def assign(self, value: DynamicLossScale | StaticLossScale) -> None:
        """Set the scale; a captured graph that uses the tensors sees the new value."""
        other = DeviceScale(value, self.device)
        self._value = value
        self.scale.copy_(other.scale)
        self._good_steps.copy_(other._good_steps)
        self._overflows.copy_(other._overflows)

    def for_step(self) -> _C.DeviceLossScale | None:
        """Return the tensors that a fused step updates; None if the scale never changes."""
        value = self._value
        if not isinstance(value, DynamicLossScale):
            return None
        return _C.DeviceLossScale(
            self.scale,
            self._good_steps,
            self._overflows,
            growth_factor=value.growth_factor,
            backoff_factor=value.backoff_factor,
            growth_interval=value.growth_interval,
            min_scale=value.min_scale,
            max_scale=value.max_scale,
            hysteresis=value.hysteresis,
        )

    def update(self, found_inf: Tensor) -> None:
        """Adjust the scale after a block; `apex_mp.loss_scale` has the rule."""
        value = self._value
        if not isinstance(value, DynamicLossScale):
            return
        ops.update_scale_(
            self.scale,
            self._good_steps,
            self._overflows,
            found_inf,
            growth_factor=value.growth_factor,
            backoff_factor=value.backoff_factor,
            growth_interval=value.growth_interval,
            min_scale=value.min_scale,
            max_scale=value.max_scale,
            hysteresis=value.hysteresis,
        )

    def read(self) -> DynamicLossScale | StaticLossScale:
        """Return the scale as a value; the host waits for it.

        Raises:
            RuntimeError: This process was forked from the one that uses the GPU.
        """
        forks.refuse_read("The loss scale", self.device)
        readback.wait()
        if not isinstance(self._value, DynamicLossScale):
            return self._value
        state = torch.stack([x.double() for x in (self.scale, self._good_steps, self._overflows)])
        scale, good_steps, overflows = state.tolist()
        return dataclasses.replace(
            self._value, scale=scale, good_steps=int(good_steps), overflows=int(overflows)
        )
