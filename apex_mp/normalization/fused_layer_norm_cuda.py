"""The compiled module fused_layer_norm_cuda of apex, by torch's own layer norm.

`mean` and `invvar` (1 / standard deviation) are vectors with an element for each row, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_backward = torch.ops.aten.native_layer_norm_backward


def forward(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float,
) -> list[Tensor]:
    """Return `[output, mean, invvar]`."""
    return _forward(input, normalized_shape, None, None, eps)


def forward_affine(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> list[Tensor]:
    """Return `[output, mean, invvar]` with weight `gamma` and bias `beta`."""
    return _forward(input, normalized_shape, gamma, beta, eps)


def backward(
    dout: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float,
) -> Tensor:
    """Return the gradient of the input."""
    shape, stats = [*normalized_shape], _statistics(input, normalized_shape, mean, invvar)
    mask = [True, False, False]
    grad: Tensor = _backward(dout.contiguous(), input, shape, *stats, None, None, mask)[0]
    return grad


def backward_affine(
    dout: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> list[Tensor]:
    """Return the gradients of the input, of `gamma` and of `beta`."""
    shape, stats = [*normalized_shape], _statistics(input, normalized_shape, mean, invvar)
    mask = [True, True, True]
    return [*_backward(dout.contiguous(), input, shape, *stats, gamma, beta, mask)]


def _forward(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
) -> list[Tensor]:
    output, mean, invvar = torch.native_layer_norm(input, [*shape], gamma, beta, eps)
    return [output, mean.reshape(-1), invvar.reshape(-1)]


def _statistics(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    mean: Tensor,
    invvar: Tensor,
) -> tuple[Tensor, Tensor]:
    """Give the two vectors the dimensions that torch's backward expects."""
    rows = input.dim() - len(shape)
    wanted = [*input.shape[:rows]] + [1] * len(shape)
    return mean.reshape(wanted), invvar.reshape(wanted)
