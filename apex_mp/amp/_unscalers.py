"""Divide gradients by the scale of their loss, and notice inf and NaN: for the host, or not yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from apex_mp import _ops
from apex_mp import grads as _grads


class Unscaler(Protocol):
    """Divides gradients by the scale of their loss."""

    def unscale(self, scaled: Sequence[Tensor], unscaled: Sequence[Tensor]) -> None:
        """Write `scaled[i]` divided by the scale to `unscaled[i]`."""

    def add_unscaled(self, scaled: Sequence[Tensor], stashed: Sequence[Tensor]) -> None:
        """Add it to `stashed[i]`, a gradient of earlier losses."""

    def check(self, unscaled: Sequence[Tensor]) -> None:
        """Look for inf and NaN that are not the fault of the scale."""


class HostUnscaler:
    """An Unscaler whose findings the host waits for.

    Args:
        scale: What the loss was scaled by.

    Attributes:
        scale: That.
        found_inf: Whether a scaled gradient held inf or NaN.
        found_in_sum: Whether an unscaled one did.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._inv_scale = 1.0 / scale
        self.found_inf = False
        self.found_in_sum = False

    def unscale(self, scaled: Sequence[Tensor], unscaled: Sequence[Tensor]) -> None:
        self.found_inf = _grads.unscale(scaled, unscaled, self._inv_scale) or self.found_inf

    def add_unscaled(self, scaled: Sequence[Tensor], stashed: Sequence[Tensor]) -> None:
        self.found_inf = _grads.add_unscaled(scaled, stashed, self._inv_scale) or self.found_inf

    def check(self, unscaled: Sequence[Tensor]) -> None:
        self.found_in_sum = _grads.check([unscaled]).found_inf or self.found_in_sum


class DeviceUnscaler:
    """An Unscaler whose findings stay on the device.

    Args:
        scale: What the loss was scaled by, 0-dim.

    Attributes:
        scale: That.
        found_inf: As in HostUnscaler, 0-dim float32: 0 or 1.
        found_in_sum: Likewise.
    """

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self._inv_scale = scale.double().reciprocal()
        self.found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        self.found_in_sum = torch.zeros((), dtype=torch.float32, device=scale.device)

    def unscale(self, scaled: Sequence[Tensor], unscaled: Sequence[Tensor]) -> None:
        _ops.unscale_(scaled, unscaled, self._inv_scale, self.found_inf)

    def add_unscaled(self, scaled: Sequence[Tensor], stashed: Sequence[Tensor]) -> None:
        one = torch.ones((), dtype=torch.float64, device="cpu")
        _ops.axpby_(scaled, stashed, stashed, self._inv_scale, one, self.found_inf, tested=0)

    def check(self, unscaled: Sequence[Tensor]) -> None:
        sum_sq = torch.zeros(1, dtype=torch.float64, device=self.found_in_sum.device)
        _ops.check_(unscaled, [0] * len(unscaled), self.found_in_sum, sum_sq)
