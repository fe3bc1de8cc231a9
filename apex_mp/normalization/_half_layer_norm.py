"""Half-precision input with float32 weights on a CPU: sums of gradients in float32.

torch's CPU kernel sums the gradients of weight and bias in the input's precision: over 4096 rows
they are up to 1 % off in float16, 9 % in bfloat16, and inf if a partial sum exceeds 65504. float32
weights deserve better. The forward is torch's. On CUDA torch does not take this pair of dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
