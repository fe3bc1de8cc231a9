"""The loss scale on the device of the gradients, so that the host waits for no device.

The host reads an overflow back later; see `apex_mp.core.readback`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import forks, ops, readback
from apex_mp.loss_scale import DynamicLossScale, Rule, StaticLossScale

# Where a scale may live. The host never waits for a CPU.
DEVICE_TYPES = {"cuda"}


class DeviceScale:
    """A loss scale and its state on a device.

    Args:
        value: The initial scale; None: the owner fills the tensors, and gives the rule itself.
        device: The device.

    Attributes:
        device: The device.
        state: What `ops.update_scale_`, or the step, writes.
        scale: Its first number, 0-dim float32.
        good_steps: Its second, 0-dim int32.
        overflows: Its third, 0-dim int32.
    """

    _value: DynamicLossScale | StaticLossScale | None = None

    def __init__(
        self, value: DynamicLossScale | StaticLossScale | None, device: torch.device
    ) -> None:
        self.device = device
        self.state = torch.zeros(3, dtype=torch.float32, device=device)
        counts = self.state.view(torch.int32)
        self.scale = self.state.select(0, 0)
        self.good_steps, self.overflows = counts.select(0, 1), counts.select(0, 2)
        if value is not None:
            self.assign(value)

    def assign(self, value: DynamicLossScale | StaticLossScale) -> None:
        """Set the scale; a captured graph that uses the tensors sees the new value."""
        self._value = value
        counts = (value.good_steps, value.overflows) if isinstance(value, DynamicLossScale) else ()
        self.fill(value.scale, *counts)

    def fill(self, scale: float, good_steps: int = 0, overflows: int = 0) -> None:
        """Write the three numbers."""
        self.scale.fill_(scale)
        self.good_steps.fill_(good_steps)
        self.overflows.fill_(overflows)

    @property
    def rule(self) -> Rule | None:
        """How the scale changes; None: it does not."""
        return self._value.rule if isinstance(self._value, DynamicLossScale) else None

    def for_step(self) -> _C.DeviceLossScale | None:
        """Return the loss scale as a fused step updates it; None if it never changes."""
        rule = self.rule
        return None if rule is None else _C.DeviceLossScale(self.state, rule)

    def update(self, found_inf: Tensor) -> None:
        """Adjust the scale after a block; `apex_mp.loss_scale` has the rule."""
        rule = self.rule
        if rule is not None:
            ops.update_scale_(self.state, rule, found_inf)

    def read(self) -> DynamicLossScale | StaticLossScale:
        """Return the scale as a value; the host waits for it."""
        forks.refuse_read("The loss scale", self.device)
        readback.wait()
        value = self._value
        assert value is not None  # Else its owner reads it.
        if not isinstance(value, DynamicLossScale):
            return value
        on_host = self.state.cpu()
        good_steps, overflows = on_host.view(torch.int32)[1:].tolist()
        return dataclasses.replace(
            value, scale=on_host[0].item(), good_steps=good_steps, overflows=overflows
        )
