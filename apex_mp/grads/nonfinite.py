"""Which gradients hold inf or NaN, and the message of a skipped step that says so."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex_mp.core.log import counted
from apex_mp.core.tensors import is_dense

_PARAMETERS_NAMED = 3


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


@dataclasses.dataclass(frozen=True)
class Overflow:
    """Gradients that hold inf or NaN.

    Attributes:
        report: Which gradients hold how many, the worst first.
        scale_before: The loss scale of these gradients.
        scale_after: The next loss scale.
    """

    report: Sequence[NonFinite]
    scale_before: float
    scale_after: float

    def log(self, logger: logging.Logger, message: str) -> None:
        """Log a message with the worst parameters under it; the record has `overflow`."""
        worst = [f"  {found}" for found in self.report[:_PARAMETERS_NAMED]]
        others = len(self.report) - _PARAMETERS_NAMED
        rest = [f"  and {counted(others, 'more parameter')}"] if others > 0 else []
        logger.warning("%s", "\n".join([message, *worst, *rest]), extra={"overflow": self})


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
