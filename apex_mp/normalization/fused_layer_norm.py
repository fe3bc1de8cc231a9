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
