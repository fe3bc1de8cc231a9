"""Exponents of gradients, compared with the range of float16."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from apex_mp.core import ops, readback, tensors
from apex_mp.scale import device_scale

# float16 has all its digits from 2**-14 on, fewer below it, and none below 2**-25.
SMALLEST_NORMAL, SMALLEST, LARGEST = -14, -24, 15
_BIAS = 127  # of the bins of exponents_
_ZEROS, _NOT_FINITE = 0, 255
# For all gradients of a step together: reading so many takes less time than listing gradients.
ELEMENTS_LOOKED_AT = 1 << 18
_RUN = 32  # elements that are looked at side by side: a line of memory of 16-bit ones
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclasses.dataclass(frozen=True)
class Exponents:
    """How many elements of a gradient lie in each power of two, after backward.

    Of a large gradient only a sample is counted, which is spread over it; `total` is the size of
    the sample, and all counts are of the sample.

    Attributes:
        name: Name of the parameter.
        shape: Its shape.
        dtype: Dtype of the gradient, for example "float16".
        counts: By exponent e, how many elements are in [2**e, 2**(e + 1)), of either sign, without
            exponents that do not occur. Counted as of the scaled gradient, even if it was unscaled
            before the sample; what unscaling lost in float16 is not restored.
        zeros: How many are zero.
        nonfinite: How many are inf or NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    counts: dict[int, int]
    zeros: int
    nonfinite: int

    @property
    def size(self) -> int:
        """How many elements the gradient has."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """How many elements were counted."""
        return sum(self.counts.values()) + self.zeros + self.nonfinite

    def of_all(self, count: int) -> float:
        """Return an estimate for the whole gradient from a count in the sample.

        Args:
            count: A number of elements of the sample.
        """
        return count * self.size / self.total if self.total else 0.0

    @property
    def smallest(self) -> int | None:
        """The smallest exponent; None if all elements are zero, inf or NaN."""
        return min(self.counts, default=None)

    @property
    def largest(self) -> int | None:
        """The largest exponent; None if all elements are zero, inf or NaN."""
        return max(self.counts, default=None)

    @property
    def underflows(self) -> int:
        """How many elements that are not zero lie below 2**-14, where float16 loses digits."""
        return self.below(SMALLEST_NORMAL)

    def below(self, exponent: int) -> int:
        """Return how many elements that are not zero lie below a power of two.

        Args:
            exponent: The power: -24 for 2**-24.
        """
        return sum(count for e, count in self.counts.items() if e < exponent)


@dataclasses.dataclass(frozen=True)
class Sample:
    """The exponents of all gradients of one step.

    Its counts are exact if there are 2**18 elements or fewer, all of which are counted. Otherwise
    they are estimates, in which each gradient has the weight of its size.

    Attributes:
        step: Number of the step.
        scale: Its loss scale.
        grads: The gradients, in the order of the model.
    """

    step: int
    scale: float
    grads: tuple[Exponents, ...]

    @property
    def total(self) -> int:
        """How many elements all gradients have."""
        return sum(grad.size for grad in self.grads)

    @property
    def looked_at(self) -> int:
        """How many elements were counted by exponent."""
        return sum(grad.total for grad in self.grads)

    @property
    def zeros(self) -> int:
        """How many of them are zero."""
        return round(sum(grad.of_all(grad.zeros) for grad in self.grads))

    @property
    def underflows(self) -> int:
        """How many that are not zero lie below 2**-14, where float16 loses digits."""
        return round(self._below(SMALLEST_NORMAL))

    def _below(self, exponent: int) -> float:
        return sum(grad.of_all(grad.below(exponent)) for grad in self.grads)

    def saved(self, scale: float) -> float:
        """Return the share of underflowing elements that would not underflow with another scale.

        If all elements were counted, this is exact, except for elements that rounding to float16
        moved across a power of two. Zeros do not count, because it is not known which of them are
        gradients that underflowed to 0.

        Args:
            scale: The other loss scale; it should be this one times a power of two.
        """
        shift = round(math.log2(scale / self.scale))
        now = self._below(SMALLEST_NORMAL)
        still = self._below(min(SMALLEST_NORMAL, SMALLEST_NORMAL - shift))
        return 1.0 - still / now if now else 0.0

    @property
    def largest_scale(self) -> float | None:
        """The largest loss scale, this one times a power of two, at which no element would be inf.

        None if all are zero. Only the counted elements of these gradients are considered: others
        may be larger.
        """
        exponents = [grad.largest for grad in self.grads if grad.largest is not None]
        return self.scale * 2.0 ** (LARGEST - max(exponents)) if exponents else None


class Sampler:
    """Counts the exponents of gradients; on a GPU the counts are read back later.

    Args:
        named: Names and gradients.
        unscaled: Dtypes of the gradients that are unscaled already.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], unscaled: Collection[torch.dtype]
    ) -> None:
        self._facts: dict[torch.device, list[tuple[int, str, Tensor]]] = {}
        for index, (name, grad) in enumerate(named):
            if tensors.not_readable(grad) is None and grad.is_floating_point():
                dense = grad if tensors.is_dense(grad) else grad.contiguous()
                self._facts.setdefault(grad.device, []).append((index, name, dense))
        self._unscaled = unscaled
        self._arrived: dict[int, tuple[str, tuple[int, ...], torch.dtype, dict[int, int]]] = {}

    @torch.no_grad()
    def run(self) -> None:
        """Count the exponents, in one pass over the gradients or a sample of them."""
        limit = _limit([grad.numel() for facts in self._facts.values() for _, _, grad in facts])
        for device, facts in self._facts.items():
            counts = torch.zeros(len(facts), ops.EXPONENT_BINS, dtype=torch.int64, device=device)
            places: dict[int, Tensor] = {}
            ops.exponents_([_part_of(grad, limit, places) for _, _, grad in facts], counts)
            kept = [(i, name, tuple(grad.shape), grad.dtype) for i, name, grad in facts]
            if device.type in device_scale.DEVICE_TYPES:
                readback.submit_tensor(counts, self._recorder(kept))
            else:
                self._recorder(kept)(counts)
        self._facts.clear()  # No gradient is kept.

    def _recorder(
        self, kept: Sequence[tuple[int, str, tuple[int, ...], torch.dtype]]
    ) -> Callable[[Tensor], None]:
        def record(counts: Tensor) -> None:
            rows: list[dict[int, int]] = [{} for _ in kept]
            flat = counts.view(-1)
            places = flat.nonzero().view(-1)
            for place, count in zip(places.tolist(), flat[places].tolist(), strict=True):
                row, bin_ = divmod(place, ops.EXPONENT_BINS)
                rows[row][bin_] = count
            for (index, name, shape, dtype), by_bin in zip(kept, rows, strict=True):
                self._arrived[index] = name, shape, dtype, by_bin

        return record

    def sample(self, step: int, scale: float) -> Sample:
        """Return the counts as a Sample."""
        shift = round(math.log2(scale)) if scale else 0  # torch's GradScaler can sink to 0.
        grads = []
        for _, (name, shape, dtype, by_bin) in sorted(self._arrived.items()):
            moved = shift if dtype in self._unscaled else 0
            zeros, nonfinite = by_bin.pop(_ZEROS, 0), by_bin.pop(_NOT_FINITE, 0)
            counts = {bin_ - _BIAS + moved: count for bin_, count in by_bin.items()}
            dtype_name = str(dtype).removeprefix("torch.")
            grads.append(Exponents(name, shape, dtype_name, counts, zeros, nonfinite))
        return Sample(step, scale, tuple(grads))


def _limit(sizes: Sequence[int]) -> int:
    """Return the most elements of one gradient that are counted."""
    left, limit = ELEMENTS_LOOKED_AT, 0
    for number, size in enumerate(sorted(sizes)):
        limit = max(left // (len(sizes) - number), _RUN)
        if size > limit:
            return limit
        left -= size
    return max(sizes, default=limit)


def _part_of(grad: Tensor, limit: int, places: dict[int, Tensor]) -> Tensor:
    """Return `limit` elements of a dense gradient, in short runs that are spread over it."""
    if grad.numel() <= limit:
        return grad
    count = grad.numel() // _RUN
    runs = grad.as_strided((count, _RUN), (_RUN, 1))
    if count not in places:
        # One run in each of equal intervals, at offsets that do not repeat with a matrix's width.
        numbers = torch.arange(limit // _RUN, dtype=torch.float64, device=grad.device)
        spread = (numbers + (numbers * _GOLDEN).frac()) * (count / len(numbers))
        places[count] = spread.long().clamp_(max=count - 1)
    return runs.index_select(0, places[count])
