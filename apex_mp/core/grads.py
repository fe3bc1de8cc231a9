"""Check and unscale gradients, whatever devices they are on; owns found_inf, knows no policy."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.core import ops
from apex_mp.core.device_scale import bring
from apex_mp.core.tensors import is_dense, is_wrapper


@dataclasses.dataclass(frozen=True)
class Checked:
    """What one pass over the gradients of parameter groups found.

    Attributes:
        found_inf: Whether a gradient holds inf or NaN.
        norms: l2 norm of each group's gradients, as they lie.
    """

    found_inf: bool
    norms: tuple[float, ...]

    @property
    def global_norm(self) -> float:
        """l2 norm of all gradients as one vector."""
        return math.hypot(*self.norms)


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A gradient that holds inf or NaN: whose, of what shape, and how many of each.

    The counts are None if the gradient was cleared before the host learnt of the step.
    """

    name: str
    shape: tuple[int, ...]
    inf: int | None = None
    nan: int | None = None

    def __str__(self) -> str:
        what = "inf or NaN" if self.inf is None else f"{self.inf} inf, {self.nan} NaN"
        return f"{self.name} {list(self.shape)}: {what}"


class Edits(enum.Enum):
    """Which gradients were edited since masters' were made of the model's."""

    NONE = "none, or masters' alone"
    OF_MODEL = "the model's"
    OF_BOTH = "the model's and masters'"


class EditWatch:
    """Detects edits of gradients by gradient version and norm.

    An all-reduce and an edit through `.data` do not change the version, so norms are compared too.
    """

    def __init__(self) -> None:
        self._model, self._masters = _C.GradMarks(), _C.GradMarks()
        self._norms: Mapping[int, float] = {}

    def begin(
        self,
        models: list[Parameter],
        norms: Mapping[int, float],
        masters: list[Parameter] | None = None,
    ) -> None:
        """Remember the gradients as they are.

        Args:
            models: The model's parameters.
            norms: Norm of each gradient of theirs, by id(); empty if it is not known.
            masters: Parameters whose gradients have just been made [None: as before].
        """
        self._norms = norms
        self._model.take(models)
        if masters is not None:
            self._masters.take(masters)

    def find(
        self, models: list[Parameter], norms: Mapping[int, float], masters: list[Parameter]
    ) -> Edits:
        """Return what was edited since; a gradient that was cleared is none. Args as in `begin`."""
        has_new_norms = not norms.items() <= self._norms.items() and any(
            not _same(self._norms.get(param), norm) for param, norm in norms.items()
        )
        if not has_new_norms and not self._model.differ(models):
            return Edits.NONE
        if not self._masters.differ(masters):
            return Edits.OF_MODEL
        # A write that changes no norm is not worth a warning.
        return Edits.OF_BOTH if has_new_norms or not norms else Edits.NONE


def _same(one: float | None, other: float) -> bool:
    """Whether two norms are equal, or both NaN."""
    return one == other or (one is not None and math.isnan(one) and math.isnan(other))


def check(groups: Sequence[Sequence[Tensor]]) -> Checked:
    """Test the gradients of each group for inf and NaN, and measure them, reading them once.

    Args:
        groups: The gradients of each parameter group, floating tensors on any devices.
    """
    by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
    for index, group in enumerate(groups):
        for grad in group:
            grads, indices = by_device.setdefault(grad.device, ([], []))
            grads.append(grad)
            indices.append(index)
    found = False
    sums = [0.0] * len(groups)
    for device, (grads, indices) in by_device.items():
        found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        sum_sq = torch.zeros(len(groups), dtype=torch.float64, device=device)
        ops.check_(grads, indices, found_inf, sum_sq)
        # One transfer: the only time the host waits for the device.
        values = torch.cat([found_inf.double(), sum_sq]).tolist()
        found = found or values[0] != 0.0
        sums = [a + b for a, b in zip(sums, values[1:], strict=True)]
    return Checked(found, tuple(math.sqrt(total) for total in sums))


@torch.no_grad()
def norms(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the l2 norm of each tensor; equal bits have equal norms."""
    return check([[t if is_dense(t) else t.contiguous()] for t in tensors]).norms


def unscale(src: Sequence[Tensor], dst: Sequence[Tensor], inv_scale: float) -> bool:
    """Write `src[i] * inv_scale` to `dst[i]` and return whether `src` holds inf or NaN.

    Args:
        src: Scaled gradients on any devices.
        dst: Where they go, each on the device of its source; may be `src` itself.
        inv_scale: 1 / loss scale.
    """
    factor = torch.tensor(inv_scale, dtype=torch.float64, device="cpu")
    found = []
    for device, (sources, targets) in _by_device(src, dst).items():
        found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        ops.unscale_(sources, targets, factor, found_inf)
        found.append(found_inf)
    return any(flag.item() != 0.0 for flag in found)


def unscale_unwaited(src: Sequence[Tensor], dst: Sequence[Tensor], scale: float | Tensor) -> None:
    """Write `src[i] / scale` to `dst[i]`, without waiting and without looking for inf and NaN.

    Args:
        src: Scaled gradients on any devices.
        dst: Where they go, each on the device of its source; may be `src` itself.
        scale: The loss scale: a number, or one on a device.
    """
    if isinstance(scale, Tensor):
        inv_scale = scale.double().reciprocal()
    else:
        inv_scale = torch.tensor(1.0 / scale, dtype=torch.float64, device="cpu")
    for device, (sources, targets) in _by_device(src, dst).items():
        found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        here = inv_scale if inv_scale.is_cpu else bring(inv_scale, device)
        ops.unscale_(sources, targets, here, found_inf)


def unscale_wrappers(grads: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """Multiply gradients in place by `inv_scale`, by the operator of torch.amp.GradScaler.

    It knows what the operators here do not: DTensors, whose processes agree on what was found.

    Args:
        grads: Wrappers on any devices.
        inv_scale: 1 / loss scale, 0-dim.

    Returns:
        For each a 0-dim float32: not 0 if it held inf or NaN.
    """
    found = []
    for grad in grads:
        flag = torch.zeros((), dtype=torch.float32, device=grad.device)
        factor = bring(inv_scale.float(), grad.device)
        torch._amp_foreach_non_finite_check_and_unscale_([grad], flag, factor)
        found.append(flag)
    return found


def add_unscaled(src: Sequence[Tensor], dst: Sequence[Tensor], inv_scale: float) -> bool:
    """Add `src[i] * inv_scale` to `dst[i]` and return whether `src` holds inf or NaN.

    Args:
        src: Scaled gradients on any devices.
        dst: Unscaled gradients, each on the device of its source; written.
        inv_scale: 1 / loss scale.
    """
    factor = torch.tensor(inv_scale, dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    found = []
    for device, (sources, targets) in _by_device(src, dst).items():
        found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        ops.axpby_(sources, targets, targets, factor, one, found_inf, tested=0)
        found.append(found_inf)
    return any(flag.item() != 0.0 for flag in found)


def lie_as(grad: Tensor, param: Tensor) -> Tensor:
    """Return the gradient with its elements in memory in the parameter's order, not negated.

    One that is not plain, or of another shape, is returned as it is; callers refuse it.
    """
    if grad.layout is not torch.strided:
        return grad
    alike = (grad.is_contiguous() and param.is_contiguous()) or grad.stride() == param.stride()
    if (alike and not grad.is_neg()) or grad.shape != param.shape or is_wrapper(grad):
        return grad
    return torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)


def locate_nonfinite(grads: Iterable[tuple[str, Tensor]]) -> list[NonFinite]:
    """Return which of the named gradients hold inf or NaN and how many, most first."""
    named = list(grads)
    counts = [_count_nonfinite(grad) for _, grad in named]
    found = []
    for (name, grad), count in zip(named, counts, strict=True):
        inf, nan = count.tolist()
        if inf or nan:
            found.append((inf + nan, NonFinite(name, tuple(grad.shape), inf, nan)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _count_nonfinite(grad: Tensor) -> Tensor:
    """How many inf and how many NaN there are, still on the device."""
    numbers = grad.detach()
    # torch's masks and sums take up to nine bytes for each element that is looked at. A GPU is
    # slow with small pieces.
    at_once = 1 << 16 if numbers.is_cpu else 1 << 24
    if numbers.numel() > at_once:
        dense = is_dense(numbers)
        flat = numbers.as_strided([numbers.numel()], [1]) if dense else numbers.reshape(-1)
        return torch.stack([_count_nonfinite(piece) for piece in torch.split(flat, at_once)]).sum(0)
    return torch.stack([numbers.isinf().sum(), numbers.isnan().sum()])


def _by_device(
    src: Sequence[Tensor], dst: Sequence[Tensor]
) -> dict[torch.device, tuple[list[Tensor], list[Tensor]]]:
    """Both lists, cut by the devices of the first."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(src, dst, strict=True):
        sources, targets = by_device.setdefault(source.device, ([], []))
        sources.append(source)
        targets.append(target)
    return by_device
