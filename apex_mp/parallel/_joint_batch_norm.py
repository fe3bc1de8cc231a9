"""Batch norm over the batches of several processes, for the CPU: torch's own is for GPUs only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable


def joint_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Normalise over the batches of all processes of a group, which may differ in size.

    Args:
        x: This process's batch, of shape (N, C, ...) and any floating dtype.
        weight: Factors of shape (C,), or None.
        bias: Summands of shape (C,), or None.
        eps: Added to the variance.
        group: The processes; None for all. Each of them calls this.

    Returns:
        The result in the dtype of `x`, mean and biased variance of each channel in float32 (float64
        for float64), and the number of values for each channel.

    Raises:
        ValueError: There is only one value for each channel.
    """
    return _JointBatchNorm.apply(x, weight, bias, eps, group)  # type: ignore[no-any-return, no-untyped-call]


class _JointBatchNorm(torch.autograd.Function):
    """Two collectives: moments in forward, two sums of gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        wide = _widened(x)
        mean, var, count = _moments(wide, group)
        invstd = (var + eps).rsqrt()
        normal = (wide - _for_channels(mean, x)) * _for_channels(invstd, x)
        ctx.save_for_backward(normal, invstd, weight)
        ctx.count, ctx.group, ctx.dtype = count, group, x.dtype
        ctx.mark_non_differentiable(mean, var)
        if weight is not None:
            normal = normal * _for_channels(weight, x)
        if bias is not None:
            normal = normal + _for_channels(bias, x)
        return normal.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, invstd, weight = ctx.saved_tensors
        wide = _widened(grad)
        grad_bias, grad_weight = _channel_sums(wide), _channel_sums(wide * normal)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # Each loss depends on all batches, so these sums are over all processes. Gradients of
            # weight and bias stay local, because DistributedDataParallel averages them.
            sums = torch.stack([grad_bias, grad_weight])
            dist.all_reduce(sums, group=ctx.group)
            of_mean, of_var = (_for_channels(one / ctx.count, normal) for one in sums)
            factor = invstd if weight is None else invstd * _widened(weight)
            grad_x = (wide - of_mean - normal * of_var) * _for_channels(factor, normal)
            grad_x = grad_x.to(ctx.dtype)
        of_weight = grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        # torch casts grad_bias to the dtype of the bias.
        return grad_x, of_weight, grad_bias if ctx.needs_input_grad[2] else None, None, None


def _moments(x: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count of each channel over all processes.

    The variance is not computed as a difference, which would cancel.
    """
    count = x.numel() // x.size(1)
    mean = _channel_sums(x) / max(count, 1)
    squares = _channel_sums((x - _for_channels(mean, x)).square())
    mine = torch.stack([torch.full_like(mean, count), mean, squares])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    counts, means, sums = torch.stack(all_of_them).unbind(1)
    total = int(counts[:, 0].double().sum().item())
    if total < 2:
        raise ValueError(
            f"SyncBatchNorm: all processes together have {total} value for each channel; "
            "training needs more than one"
        )
    joint = (counts * means).sum(0) / total
    return joint, (sums + counts * (means - joint).square()).sum(0) / total, total


def _channel_sums(x: Tensor) -> Tensor:
    return x.sum([0, *range(2, x.dim())])


def _for_channels(values: Tensor, x: Tensor) -> Tensor:
    """Give a vector over channels the dimensions of `x`."""
    return values.view([1, -1, *[1] * (x.dim() - 2)])


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
