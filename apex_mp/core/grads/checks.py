"""Gradients: whether they were edited, their layout in memory, which hold inf or NaN."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.core.tensors import is_dense, is_wrapper


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A gradient that holds inf or NaN: its parameter's name, its shape, and how many of each.

    The counts are None if the gradient was cleared before the host knew the step's outcome.
    """

    name: str
    shape: tuple[int, ...]
    inf: int | None = None
    nan: int | None = None

    def __str__(self) -> str:
        what = "inf or NaN" if self.inf is None else f"{self.inf} inf, {self.nan} NaN"
        return f"{self.name} {list(self.shape)}: {what}"


class Edits(enum.Enum):
    """Which gradients were edited after the masters' gradients were made from the model's."""

    NONE = "none, or masters' alone"
    OF_MODEL = "the model's"
    OF_BOTH = "the model's and masters'"


class EditWatch:
    """Detects edits of gradients by gradient version and norm.

    An all-reduce and an edit through `.data` do not change the version, so norms are compared too.
    """

    def __init__(self) -> None:
        self._model, self._masters = _C.GradVersions(), _C.GradVersions()
        self._norms: Mapping[int, float] | None = None

    def begin(
        self,
        models: list[Parameter],
        norms: Mapping[int, float] | None,
        masters: list[Parameter] | None = None,
    ) -> None:
        """Remember the gradients as they are.

        Args:
            models: The model's parameters.
            norms: Norm of each gradient of theirs, by id() [None: not measured].
            masters: Parameters whose gradients have just been made [None: as before].
        """
        self._norms = norms
        self._model.record(models)
        if masters is not None:
            self._masters.record(masters)

    def find(
        self, models: list[Parameter], norms: Mapping[int, float] | None, masters: list[Parameter]
    ) -> Edits:
        """Return what was edited since `begin`, with its Args; clearing a gradient is no edit."""
        before = self._norms
        has_new_norms = (
            before is not None
            and norms is not None
            and any(not _same(before.get(param), norm) for param, norm in norms.items())
        )
        if not has_new_norms and not self._model.changed(models):
            return Edits.NONE
        if not self._masters.changed(masters):
            return Edits.OF_MODEL
        # A write that changes no norm is not worth a warning.
        return Edits.OF_BOTH if has_new_norms or not norms else Edits.NONE


def _same(one: float | None, other: float) -> bool:
    """Whether two norms are equal, or both NaN."""
    return one == other or (one is not None and math.isnan(one) and math.isnan(other))


def match_strides(grad: Tensor, param: Tensor) -> Tensor:
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
    """Return the number of inf and of NaN as a tensor on the device."""
    numbers = grad.detach()
    # torch's masks and sums take up to nine bytes for each element, so the gradient is counted in
    # pieces. Small pieces are slow on a GPU.
    at_once = 1 << 16 if numbers.is_cpu else 1 << 24
    if numbers.numel() > at_once:
        dense = is_dense(numbers)
        flat = numbers.as_strided([numbers.numel()], [1]) if dense else numbers.reshape(-1)
        return torch.stack([_count_nonfinite(piece) for piece in torch.split(flat, at_once)]).sum(0)
    return torch.stack([numbers.isinf().sum(), numbers.isnan().sum()])
