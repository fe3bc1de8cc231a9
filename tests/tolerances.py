"""How near a result must come to the reference: one table for all tests, by dtype, with reasons."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bounds of |actual - expected|: `rtol * |expected| + atol`, for numbers of size 1 or so."""

    rtol: float
    atol: float


# What one operator call may lose against float64.
TOLERANCES = {
    # Ten roundings of 2**-53 each at the most, and a few more in a test's own float64 reference.
    torch.float64: Tolerance(rtol=2.0**-49, atol=2.0**-49),
    # Ten roundings of 2**-24 each at the most, of operands that are up to 4 in size.
    torch.float32: Tolerance(rtol=2.0**-21, atol=2.0**-21),
    # A float32 result, which loses the above, rounded once: half an ulp is 2**-11.
    torch.float16: Tolerance(rtol=2.0**-11 * 1.01, atol=2.0**-20),
    # The same: half an ulp is 2**-8.
    torch.bfloat16: Tolerance(rtol=2.0**-8 * 1.01, atol=2.0**-20),
}

# A norm and its gradients: sums of up to 50 numbers, in an order that is the device's own, about
# twenty roundings of operands that are up to 10 in size. A half-precision result is one rounding.
NORM_TOLERANCES = {
    **TOLERANCES,
    torch.float64: Tolerance(rtol=2.0**-47, atol=2.0**-47),
    torch.float32: Tolerance(rtol=2.0**-19, atol=2.0**-19),
}

# What hundreds of optimizer steps may lose: the roundings above, once a step, partly cancelling.
TRAJECTORY_TOLERANCES = {
    torch.float64: Tolerance(rtol=1e-11, atol=1e-12),
    torch.float32: Tolerance(rtol=1e-5, atol=2e-6),
}

# A sum of squares is taken in float32 over 16 numbers a lane and goes on in float64: 17 roundings.
SUM_OF_SQUARES_TOLERANCES = {
    torch.float64: Tolerance(rtol=1e-13, atol=0.0),
    torch.float32: Tolerance(rtol=17 * 2.0**-24, atol=0.0),
    torch.float16: Tolerance(rtol=17 * 2.0**-24, atol=0.0),
    torch.bfloat16: Tolerance(rtol=17 * 2.0**-24, atol=0.0),
}


@dataclasses.dataclass(frozen=True)
class Closeness:
    """How far a whole training may end from its reference, by l2 norm.

    `weights` is a part of the way that the reference's weights have gone, `state` of its moments.
    """

    weights: float
    state: float


# Every weight, activation and gradient in float16 is off by up to 2**-11 of itself, differently in
# each of the 20 to 60 steps. Measured: weights 0.2 %, moments, which shrink as the model learns,
# 1.1 % at the most. A wrong factor, a step too many, or a missing clip costs several times these.
FP16_TRAINING = Closeness(weights=0.01, state=0.05)
# A ReLU that closes in one of the two and not in the other amplifies that. Measured over 12 seeds
# and two implementations of the convolution: weights 1.6 %, moments 8.3 % at the most.
FP16_CONVNET_TRAINING = Closeness(weights=0.04, state=0.2)
# The roundings of TRAJECTORY_TOLERANCES, which the training amplifies.
FP32_TRAINING = Closeness(weights=1e-4, state=1e-4)


def assert_near(actual: Tensor, expected: Tensor, tolerance: Tolerance | None = None) -> None:
    """Compare with a float64 reference, by default within the tolerance of `actual`'s dtype."""
    bounds = tolerance or TOLERANCES[actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=bounds.rtol, atol=bounds.atol, equal_nan=True
    )


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers, so that -0.0 differs from 0.0."""
    return tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Demand equal shape, dtype and bits; any NaN equals any NaN, as payloads mean nothing."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual, expected = (_plain(each) for each in (actual, expected))
    if torch.equal(bits_of(actual), bits_of(expected)):
        return
    differs = bits_of(actual) != bits_of(expected)
    if actual.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan()).reshape(-1)
    where = differs.nonzero().reshape(-1)[:5].tolist()
    assert not where, (
        f"bits differ at elements {where}: {actual.reshape(-1)[where].tolist()} is not "
        f"{expected.reshape(-1)[where].tolist()}"
    )
