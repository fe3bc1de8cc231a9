"""Check and unscale gradients on any devices; keep found_inf, but decide nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import ops
from apex_mp.core.tensors import (
    Lists,
    copy_async,
    has_kernels,
    is_dense,
    is_wrapper,
    local_part,
    writable,
)


class FoundInf:
    """Whether gradients held inf or NaN, and their sums of squares: numbers on their devices.

    Each method reads gradients once, and adds to what others have found; the host does not wait.
    `bool()`, `norms` and `norm` wait, once for each device; `on` does not.

    Attributes:
        flags: By device, 0-dim float32: not 0 if a gradient there held inf or NaN.
        sum_sq: By device, float64: sums of squares that were asked for last, in one place each.
    """

    def __init__(self) -> None:
        self.flags: dict[torch.device, Tensor] = {}
        self.sum_sq: dict[torch.device, Tensor] = {}
        self._count = 0  # elements of `sum_sq`, if no device has any
        self._read: list[list[float]] | None = None  # both, as the host has read them

    def check(
        self, grads: Sequence[Tensor], rows: Sequence[int] | None = None, count: int = 0
    ) -> None:
        """Look for inf and NaN.

        Args:
            grads: Floating tensors on any devices; of DTensors what this process holds is read, and
                of other wrappers no squares are summed.
            rows: For each the element of `sum_sq` on its device that is its sum of squares; they
                increase [None: squares are not summed].
            count: The number of these elements [0].
        """
        self._count = count
        by_device: dict[torch.device, _C.DeviceGrads] = {}
        for row, each in enumerate(grads) if rows is None else zip(rows, grads, strict=True):
            grad = local_part(each)
            if is_wrapper(grad):
                self.unscale_wrappers([grad], 1.0)
                continue
            by_device.setdefault(grad.device, _C.DeviceGrads(grad.device)).insert(row, grad)
        for device, here in by_device.items():
            self.check_each(device, here, len(grads) if rows is None else count)
        if rows is None:
            self.sum_sq = {}

    def check_lists(self, lists: Lists) -> None:
        """Check the gradients of groups, of which some are None; rows are numbers in all lists."""
        grads = [*itertools.chain.from_iterable(lists)]
        rows = [row for row, grad in enumerate(grads) if grad is not None]
        self.check([grad for grad in grads if grad is not None], rows, len(grads))

    def check_each(self, device: torch.device, grads: _C.DeviceGrads, count: int) -> None:
        """Check the gradients of one device; their rows are those of `sum_sq`, of `count`."""
        sum_sq = self._sums(device, count)
        grads.check(self._flag(device), sum_sq)

    def _sums(self, device: torch.device, count: int) -> Tensor:
        self._count = count
        sum_sq = torch.zeros(count, dtype=torch.float64, device=device)
        self.sum_sq[device] = sum_sq
        return sum_sq

    def unscale(
        self,
        src: Sequence[Tensor],
        dst: Sequence[Tensor],
        inv_scale: float | Tensor,
        rows: Sequence[int] = (),
        count: int | None = None,
    ) -> None:
        """Write `src[i] * inv_scale` to `dst[i]`.

        Args:
            src: Scaled gradients on any devices.
            dst: Where they go, each on the device of its source; may be `src` itself.
            inv_scale: 1 / loss scale: a number, or 0-dim on a device.
            rows: As of `check`, of the squares of `dst`, which are then on one device.
            count: The number of elements of `sum_sq` [None: squares are not summed].
        """
        for device, (sources, targets) in _by_device(src, dst).items() if src else ():
            sum_sq = None if count is None else self._sums(device, count)
            factor, flag = _on(inv_scale, device), self._flag(device)
            ops.unscale_(sources, targets, factor, flag, rows, sum_sq)

    def add_unscaled(
        self, src: Sequence[Tensor], dst: Sequence[Tensor], inv_scale: float | Tensor
    ) -> None:
        """Add `src[i] * inv_scale` to `dst[i]`, whose own inf and NaN do not count."""
        if not src:
            return
        one = torch.ones((), dtype=torch.float64, device="cpu")
        for device, (sources, targets) in _by_device(src, dst).items():
            factor, flag = _on(inv_scale, device), self._flag(device)
            ops.axpby_(sources, targets, targets, factor, one, flag, tested=0)

    def unscale_others(self, grads: Sequence[Tensor], inv_scale: float | Tensor) -> None:
        """Unscale, in place, gradients that the operators cannot read directly.

        Args:
            grads: Gradients that are sparse, complex, not dense in memory, wrappers, or on a device
                without kernels.
            inv_scale: As in `unscale`.
        """
        for grad in grads:
            values = grad._values() if grad.is_sparse else grad
            if is_wrapper(values) or not has_kernels(values.device):
                self.unscale_wrappers([values], inv_scale)
                continue
            dense = writable(values)
            reals = [torch.view_as_real(dense) if dense.is_complex() else dense]
            self.unscale(reals, reals, inv_scale)
            if dense is not values:
                with torch.inference_mode(values.is_inference()):  # Else it cannot be written.
                    values.copy_(dense)

    def unscale_wrappers(self, grads: Sequence[Tensor], inv_scale: float | Tensor) -> None:
        """Multiply gradients in place by `inv_scale`, by the operator of torch.amp.GradScaler.

        It knows what the operators here do not: DTensors, whose processes agree on what was found.

        Args:
            grads: Wrappers on any devices.
            inv_scale: As in `unscale`.
        """
        for grad in grads:
            found = torch.zeros((), dtype=torch.float32, device=grad.device)
            factor = copy_async(_on(inv_scale, grad.device).float(), grad.device)
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, factor)
            self.add({grad.device: found})

    def sums_on(self, device: torch.device) -> Tensor:
        """Return the sums of squares on all devices, on one of them; the host does not wait."""
        sums = [copy_async(each, device) for each in self.sum_sq.values()]
        if not sums:
            return torch.zeros(self._count, dtype=torch.float64, device=device)
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def replace_sums(self, device: torch.device, sum_sq: Tensor) -> None:
        """Replace the sums of squares of all devices by those on one device."""
        self._read, self._count = None, len(sum_sq)
        self.sum_sq = {device: sum_sq}

    def add(self, flags: Mapping[torch.device, Tensor]) -> None:
        """Add the flags of another FoundInf."""
        for device, found in flags.items():
            flag = self._flag(device)
            flag.copy_(torch.maximum(flag, found))

    def __bool__(self) -> bool:
        """Whether a gradient held inf or NaN; the host waits."""
        return bool(self.flags) and any(found != 0.0 for found, *_ in self._numbers())

    @property
    def norms(self) -> list[float]:
        """The root of each element of `sum_sq`, over all devices; the host waits."""
        sums = [0.0] * self._count
        for _, *sum_sq in self._numbers():
            sums = [a + b for a, b in zip(sums, sum_sq, strict=True)]
        return [math.sqrt(each) for each in sums]

    def group_norms(self, lists: Lists) -> list[float]:
        """Return the norm of each list that `check_lists` has checked; the host waits."""
        each = iter(self.norms)
        return [math.hypot(*itertools.islice(each, len(grads))) for grads in lists]

    @property
    def norm(self) -> float:
        """The root of the sum of all `sum_sq`; the host waits."""
        return math.sqrt(sum(sum(sum_sq) for _, *sum_sq in self._numbers()))

    def on(self, device: torch.device) -> Tensor:
        """Return one flag of all devices: 0-dim float32, 0 or 1; the host does not wait."""
        return one_flag(self.flags, device)

    def join(self, device: torch.device) -> dict[torch.device, Tensor]:
        """Replace all flags by one on `device`, 1 if any of them was not 0; return the flags.

        torch's fused optimizers skip a step only if the sum of the flags is 1. torch copies flags
        with non_blocking=True, so they must be on `device`, where they are read, already.
        """
        if self.flags.keys() - {device}:
            joined = self._flag(device)
            for flag in self.flags.values():
                if flag is not joined:
                    joined.copy_(torch.maximum(joined, copy_async(flag, device)))
                    flag.zero_()
        return self.flags

    def _flag(self, device: torch.device) -> Tensor:
        """Return the flag of a device, which is about to be written."""
        self._read = None
        flag = self.flags.get(device)
        if flag is None:
            flag = self.flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        return flag

    def _numbers(self) -> list[list[float]]:
        """Flag and sums of squares of each device."""
        if self._read is None:
            self._read = [
                torch.cat([flag.double().view(1), self.sum_sq[device]]).tolist()
                if device in self.sum_sq
                else [flag.item()]
                for device, flag in self.flags.items()
            ]
        return self._read


def one_flag(flags: Mapping[torch.device, Tensor], device: torch.device) -> Tensor:
    """Return one flag for those of several devices: 0-dim float32 on `device`, not 0 if any is."""
    here = [copy_async(flag, device) for flag in flags.values()]
    if len(here) == 1:
        return here[0]
    return torch.stack([*here, torch.zeros((), device=device)]).amax()


_ADDED_TO_NORM = 1e-6  # as by torch.nn.utils.clip_grad_norm_ and csrc/math/clip.h


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients of a norm are multiplied by to clip them, at most 1."""
    return min(1.0, max_norm / (norm + _ADDED_TO_NORM))


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return 1 / `clip_factor` of a norm on a device: 0-dim float64."""
    divisor = torch.clamp((norm.double() + _ADDED_TO_NORM) / max_norm, min=1.0)
    return torch.where(norm.isfinite(), divisor, 1.0)  # The step is skipped then.


def inverse(scale: float | Tensor) -> float | Tensor:
    """Return 1 / scale in float64: a number, or a tensor on the scale's device."""
    return scale.double().reciprocal() if isinstance(scale, Tensor) else 1.0 / scale


@torch.no_grad()
def norms(tensors: Iterable[Tensor]) -> list[float]:
    """Return the l2 norm of each tensor, to the bit the same for equal tensors; the host waits."""
    dense = [t if is_dense(t) else t.contiguous() for t in tensors]
    found = FoundInf()
    found.check(dense, range(len(dense)), len(dense))
    return found.norms


def _on(factor: float | Tensor, device: torch.device) -> Tensor:
    """Return a factor where the operators take it: on their device, or on the CPU."""
    if not isinstance(factor, Tensor):
        return torch.tensor(factor, dtype=torch.float64, device="cpu")
    return factor if factor.is_cpu else copy_async(factor, device)


def _by_device(
    src: Sequence[Tensor], dst: Sequence[Tensor]
) -> dict[torch.device, tuple[list[Tensor], list[Tensor]]]:
    """Both lists, cut by the devices of the first."""
    devices = {source.device for source in src}
    if len(devices) == 1:
        return {devices.pop(): ([*src], [*dst])}
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(src, dst, strict=True):
        sources, targets = by_device.setdefault(source.device, ([], []))
        sources.append(source)
        targets.append(target)
    return by_device
