"""Layer norm with the signatures of apex.normalization, computed by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with the arguments of apex.

    Args:
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the variance [1e-5].
        elementwise_affine: Have a weight and a bias [True].
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else [*normalized_shape]
        super().__init__(shape, eps=eps, elementwise_affine=elementwise_affine)


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
) -> Tensor:
    """Normalise over the last dimensions; `eps` is 1e-6 here, unlike that of the module."""
    return functional.layer_norm(input, [*normalized_shape], None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise over the last dimensions, then multiply by `weight` and add `bias`."""
    return functional.layer_norm(input, [*normalized_shape], weight, bias, eps)


class FusedLayerNormFunction:
    """What normalises, by both of its old calls: an object that is called, and `apply`.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the variance [1e-6].
    """

    def __init__(self, normalized_shape: Sequence[int], eps: float = 1e-6) -> None:
        self.normalized_shape = normalized_shape
        self.eps = eps

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise, as until the spring of 2019."""
        return self.apply(input, self.normalized_shape, self.eps)

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        normalized_shape: Sequence[int],
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise, as since then."""
        return fused_layer_norm(input, normalized_shape, eps)


class FusedLayerNormAffineFunction:
    """See `FusedLayerNormFunction`; this one has a weight and a bias."""

    def __init__(self, normalized_shape: Sequence[int], eps: float = 1e-6) -> None:
        self.normalized_shape = normalized_shape
        self.eps = eps

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: A002
        """Normalise, as until the spring of 2019."""
        return self.apply(input, weight, bias, self.normalized_shape, self.eps)

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise, as since then."""
        return fused_layer_norm_affine(input, normalized_shape, weight, bias, eps)
