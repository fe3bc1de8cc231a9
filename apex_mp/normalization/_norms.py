"""The norms behind all names of this package: torch's, also for tensors of two dtypes."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

_backward = torch.ops.aten.native_layer_norm_backward
# float32 elements that one thread processes at a time, few enough to stay in its cache.
_ELEMENTS = 1 << 18


def half_layer_norm(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the norm in the input's dtype; arguments as of `torch.nn.functional.layer_norm`.

    Args:
        input: In float16 or bfloat16, on a CPU.
        shape: The last dimensions of the input.
        weight: In float32, float16 or bfloat16; None is ones.
        bias: The same; None is zeros.
        eps: Added to the variance.
    """
    if weight is None:
        weight = input.new_ones(shape, dtype=torch.float32)
    if bias is None:
        bias = input.new_zeros(shape, dtype=torch.float32)
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in (input, weight, bias))):
        return torch.native_layer_norm(input, shape, weight.float(), bias.float(), eps)[0]
    normed: Tensor = _HalfLayerNorm.apply(input, weight, bias, shape, eps)  # type: ignore[no-untyped-call]
    return normed


class _HalfLayerNorm(torch.autograd.Function):
    """The norm as an autograd function; keeps the input and two numbers a row, as torch does."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor,
        shape: Sequence[int],
        eps: float,
    ) -> Tensor:
        # With float32 weights the kernel keeps mean and 1 / deviation in float32.
        output, mean, rstd = torch.native_layer_norm(
            input, shape, weight.float(), bias.float(), eps
        )
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on if the gradient itself will be differentiated.
        found = _differentiable(ctx, grad) if torch.is_grad_enabled() else _in_blocks(ctx, grad)
        return (*found, None, None)


def _differentiable(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    of = ctx.saved_tensors[:3]
    x, weight, bias = (each.float() for each in of)
    output = functional.layer_norm(x, ctx.shape, weight, bias, ctx.eps).to(grad.dtype)
    needed = [each for each, is_needed in zip(of, ctx.needs_input_grad, strict=False) if is_needed]
    found = iter(torch.autograd.grad(output, needed, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in ctx.needs_input_grad[:3]]


def _in_blocks(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients, computed in float32 for one block of rows after the other."""
    input, weight, bias, mean, rstd = ctx.saved_tensors  # noqa: A001
    mask = [*ctx.needs_input_grad[:3]]
    size, count = weight.numel(), mean.numel()
    x, dy = input.reshape(count, size), grad.reshape(count, size)
    stats = mean.reshape(count, 1), rstd.reshape(count, 1)
    weights = weight.float().reshape(size), bias.float().reshape(size)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = torch.zeros(2, size)
    rows = max(1, _ELEMENTS * torch.get_num_threads() // max(1, size))
    for begin in range(0, count, rows):
        of = slice(begin, begin + rows)
        found = _backward(
            dy[of].float(), x[of].float(), [size], *(each[of] for each in stats), *weights, mask
        )
        if mask[0]:
            dx[of].copy_(found[0])
        for total, part in zip(sums, found[1:], strict=True):
            if part is not None:
                total.add_(part)
    wanted = [dx.view(input.shape), *(each.view(weight.shape) for each in sums)]
    dtypes = input.dtype, weight.dtype, bias.dtype
    return [
        each.to(dtype) if is_needed else None
        for each, dtype, is_needed in zip(wanted, dtypes, mask, strict=True)
    ]


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
