"""The norms behind all names of this package: torch's, also for tensors of two dtypes."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from apex_mp.normalization._half_layer_norm import half_layer_norm

Shape = int | Sequence[int]
# The tensor whose dtype the output has.
Like = Literal["input", "weight"]


def layer_norm(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    like: Like = "input",
) -> Tensor:
    """Return torch's layer norm; see `_computed` for dtypes.

    Args:
        input: The last dimensions are `shape`.
        shape: The dimensions to normalise over.
        weight: Of shape `shape`, or None.
        bias: Of shape `shape`, or None.
        eps: Added to the variance.
        like: The tensor whose dtype the output has, if casts are off ["input"].
    """
    if _is_plain(input, weight, bias):
        return functional.layer_norm(input, shape, weight, bias, eps)
    dtype, output = _computed(input, weight, bias, like=like)
    if output is input.dtype and dtype is not torch.float64 and _sums_in_half(input):
        return half_layer_norm(input, shape, weight, bias, eps)
    weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    return functional.layer_norm(input.to(dtype), [*shape], weight, bias, eps).to(output)


def rms_norm(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    like: Like = "input",
) -> Tensor:
    """Return torch's RMS norm; arguments as of `layer_norm`."""
    if _is_plain(input, weight):
        return functional.rms_norm(input, shape, weight, eps)
    dtype, output = _computed(input, weight, like=like)
    weight = None if weight is None else weight.to(dtype)
    return functional.rms_norm(input.to(dtype), [*shape], weight, eps).to(output)


def is_shape(value: object) -> bool:
    """Return whether a value can be a `normalized_shape`."""
    if isinstance(value, Sequence):
        return all(isinstance(size, numbers.Integral) for size in value)
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_shape(normalized_shape: Shape) -> tuple[int, ...]:
    """Return the sizes as a tuple; a number is one size."""
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    return tuple(normalized_shape)  # type: ignore[arg-type]


def _is_plain(input: Tensor, *weights: Tensor | None) -> bool:  # noqa: A002
    """Return whether all tensors have one dtype, and nothing is cast."""
    for each in weights:
        if each is not None and each.dtype is not input.dtype:
            return False
    return not torch.is_autocast_enabled(input.device.type)


def _sums_in_half(input: Tensor) -> bool:  # noqa: A002
    """Return whether torch's layer norm would sum gradients of float32 weights in 16 bits."""
    if input.dtype not in (torch.float16, torch.bfloat16):
        return False
    # Compiled and traced code, and transforms of torch.func, use torch's operators only.
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    transformed = torch._C._are_functorch_transforms_active()
    recorded = torch.compiler.is_compiling() or traced or transformed
    return input.device.type == "cpu" and not recorded


def _computed(
    input: Tensor,  # noqa: A002
    *weights: Tensor | None,
    like: Like,
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to compute in, and that of the output.

    The dtype to compute in holds all tensors exactly: float32 for half precision with float32, a
    pair that torch takes only on the CPU. Tensors of one dtype are given to torch's kernel as they
    are, which computes in float32 inside. If casts are on, norms run in float32, as `layer_norm`
    does by amp's lists, and both norms in torch.autocast on CUDA.
    """
    tensors = [input, *(each for each in weights if each is not None)]
    if not input.is_floating_point():  # The result would be rounded to whole numbers.
        raise TypeError(f"norm: input is {input.dtype}; it must be of a floating-point dtype")
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.promote_types(dtype, torch.float32)
        return dtype, dtype
    return dtype, tensors[1 if like == "weight" else 0].dtype
