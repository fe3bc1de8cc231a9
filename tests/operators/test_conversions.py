"""float16 and bfloat16 are converted as torch converts them: every pattern, every midpoint."""

from __future__ import annotations

import pytest
import torch
from op_cases import BF16, F16, F32, F64, NAMES
from tolerances import assert_same_bits
from torch import Tensor

from apex_mp.core import ops

pytestmark = pytest.mark.usefixtures("cpu_level")

HALVES = pytest.mark.parametrize("half", [F16, BF16], ids=NAMES.get)
# At each length some code converts: whole vectors, or only what is left behind them.
LENGTHS = pytest.mark.parametrize("length", [1 << 20, 7], ids=["in vectors", "in tails"])


def converted(numbers: Tensor, dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
    """Convert by unscale_ with factor one, cut into tensors of `length` elements."""
    numbers = numbers.to(device)
    result = torch.empty(numbers.shape, dtype=dtype, device=device)
    factor = torch.ones((), dtype=F64, device=device)
    found_inf = torch.zeros(1, device=device)
    ops.unscale_(list(numbers.split(length)), list(result.split(length)), factor, found_inf)
    return result.cpu()


def every(half: torch.dtype) -> Tensor:
    """Return the numbers of all 65,536 bit patterns."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(half)


def around_each_rounding(half: torch.dtype) -> Tensor:
    """Return each number of `half`, each midpoint of neighbours, and the float32s next to these."""
    numbers = every(half).float()
    finite = numbers[numbers.isfinite()].unique()  # Sorted.
    midpoints = (finite[:-1].double() + finite[1:].double()) / 2
    # Where infinity begins: the midpoint of the largest number and the one that would come next.
    largest = finite[-1].double()
    beyond = largest + (largest - finite[-2].double()) / 2
    exact = torch.cat([finite.double(), midpoints, beyond.view(1), -beyond.view(1)]).float()
    infinity = torch.tensor(float("inf"))
    return torch.cat(
        [exact, exact.nextafter(infinity), exact.nextafter(-infinity), numbers, -finite]
    )


@LENGTHS
@HALVES
def test_every_half_widens_as_in_torch(
    half: torch.dtype, length: int, device: torch.device
) -> None:
    assert_same_bits(converted(every(half), F32, device, length), every(half).float())


@LENGTHS
@HALVES
def test_every_half_widens_to_float64_as_in_torch(
    half: torch.dtype, length: int, device: torch.device
) -> None:
    assert_same_bits(converted(every(half), F64, device, length), every(half).double())


@LENGTHS
@HALVES
def test_float32_rounds_to_nearest_ties_to_even(
    half: torch.dtype, length: int, device: torch.device
) -> None:
    numbers = around_each_rounding(half)
    assert_same_bits(converted(numbers, half, device, length), numbers.to(half))


def test_float64_goes_to_a_half_by_way_of_float32(device: torch.device) -> None:
    # Just above the midpoint of 1 and the next half: float32 rounds it to the midpoint, and that
    # to 1, as torch does.
    number = torch.full((40,), 1 + 2.0**-11 + 2.0**-40, dtype=F64)
    assert_same_bits(converted(number, F16, device, 40), number.to(F16))
    assert_same_bits(converted(number, F32, device, 40), number.to(F32))
