"""Divide gradients by the scale of their loss, and notice inf and NaN: for the host, or not yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from apex_mp.core import grads as _grads
from apex_mp.core import ops
from apex_mp.core.tensors import is_wrapper


class Unscaler(Protocol):
    """Divides gradients by the scale of their loss."""

    def unscale(self, scaled: Sequence[Tensor], unscaled: Sequence[Tensor]) -> None:
        """Write `scaled[i]` divided by the scale to `unscaled[i]`."""

    def add_unscaled(self, scaled: Sequence[Tensor], stashed: Sequence[Tensor]) -> None:
        """Add it to `stashed[i]`, a gradient of earlier losses."""

    def unscale_wrappers(self, grads: Sequence[Tensor]) -> None:
        """Divide by the scale, in place, gradients such as DTensors."""

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

    def unscale_wrappers(self, grads: Sequence[Tensor]) -> None:
        found = _grads.unscale_wrappers(grads, torch.tensor(self._inv_scale, device="cpu"))
        self.found_inf = sum(flag.item() for flag in found) > 0.0 or self.found_inf

    def check(self, unscaled: Sequence[Tensor]) -> None:
        plain, wrappers = _split(unscaled)
        found = _grads.unscale_wrappers(wrappers, torch.ones((), device="cpu"))
        wrapped_inf = sum(flag.item() for flag in found) > 0.0
        self.found_in_sum = _grads.check([plain]).found_inf or wrapped_inf or self.found_in_sum


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
        ops.unscale_(scaled, unscaled, self._inv_scale, self.found_inf)

    def add_unscaled(self, scaled: Sequence[Tensor], stashed: Sequence[Tensor]) -> None:
        one = torch.ones((), dtype=torch.float64, device="cpu")
        ops.axpby_(scaled, stashed, stashed, self._inv_scale, one, self.found_inf, tested=0)

    def unscale_wrappers(self, grads: Sequence[Tensor]) -> None:
        for flag in _grads.unscale_wrappers(grads, self._inv_scale):
            self.found_inf.copy_(torch.maximum(self.found_inf, flag))

    def check(self, unscaled: Sequence[Tensor]) -> None:
        plain, wrappers = _split(unscaled)
        sum_sq = torch.zeros(1, dtype=torch.float64, device=self.found_in_sum.device)
        ops.check_(plain, [0] * len(plain), self.found_in_sum, sum_sq)
        for flag in _grads.unscale_wrappers(wrappers, torch.ones_like(self.scale)):
            self.found_in_sum.copy_(torch.maximum(self.found_in_sum, flag))


def _split(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return plain gradients, and wrappers, which only torch's own operators can read."""
    plain = [grad for grad in grads if not is_wrapper(grad)]
    return plain, [grad for grad in grads if is_wrapper(grad)]
