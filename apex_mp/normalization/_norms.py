"""What every name of this package computes: torch's norms, for tensors of two dtypes too."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Shape = int | Sequence[int]
# The tensor whose dtype the output has.
Like = Literal["input", "weight"]


def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    like: Like = "input",
) -> Tensor:
    """Return torch's layer norm; see `_computed` for dtypes.

    Args:
        input: The last dimensions are `normalized_shape`.
        normalized_shape: A number or a sequence.
        weight: Of shape `normalized_shape`, or none.
        bias: The same.
        eps: Added to the variance.
        like: Whose dtype the output has, where casts are off ["input"].
    """
    shape = [*as_shape(normalized_shape)]
    if _is_plain(input, weight, bias):
        return functional.layer_norm(input, shape, weight, bias, eps)
    dtype, output = _computed(input, weight, bias, like=like)
    weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    return functional.layer_norm(input.to(dtype), shape, weight, bias, eps).to(output)


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    weight: Tensor | None,
    eps: float | None,
    *,
    like: Like = "input",
) -> Tensor:
    """Return torch's norm by the root of the mean square; arguments as of `layer_norm`."""
    shape = [*as_shape(normalized_shape)]
    if _is_plain(input, weight):
        return functional.rms_norm(input, shape, weight, eps)
    dtype, output = _computed(input, weight, like=like)
    weight = None if weight is None else weight.to(dtype)
    return functional.rms_norm(input.to(dtype), shape, weight, eps).to(output)


def is_shape(value: object) -> bool:
    """Tell whether this can be a `normalized_shape`."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(isinstance(size, numbers.Integral) for size in value)
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_shape(normalized_shape: Shape) -> tuple[int, ...]:
    """Return the sizes as a tuple, of a number too."""
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    return tuple(normalized_shape)  # type: ignore[arg-type]


def _is_plain(input: Tensor, *weights: Tensor | None) -> bool:  # noqa: A002
    """Tell whether all tensors have one dtype and nothing is cast: then torch's kernel does it."""
    same = all(each is None or each.dtype is input.dtype for each in weights)
    return same and not torch.is_autocast_enabled(input.device.type)


def _computed(
    input: Tensor,  # noqa: A002
    *weights: Tensor | None,
    like: Like,
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to compute in, and that of the output.

    What computes holds all tensors without a rounding: float32 for half precision with float32.
    torch takes that pair on the CPU alone, and sums gradients of the weights in half precision
    there. Where casts are on, a norm is a function that runs in float32, as `layer_norm` in amp's
    lists, and as torch.autocast has it on CUDA.
    """
    tensors = [input, *(each for each in weights if each is not None)]
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.promote_types(dtype, torch.float32)
        return dtype, dtype
    return dtype, (tensors[-1] if like == "weight" else input).dtype
