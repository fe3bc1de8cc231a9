"""SyncBatchNorm with the arguments of apex, over torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


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


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` with the arguments of apex.

        norm = SyncBatchNorm(64)

    Without other processes it is an ordinary batch norm. On the CPU it is computed here, over any
    backend that takes CPU tensors, such as gloo. It has no second derivative on either device.

    Args:
        num_features: Channels.
        eps: Added to the variance [1e-5].
        momentum: Share of a batch in the running statistics [0.1].
        affine: Have a weight and a bias [True].
        track_running_stats: Keep running statistics for evaluation [True].
        process_group: Whose batches are one batch [None: those of all processes].
        channel_last: The input's channels are its last dimension [False].
        fuse_relu: Apply relu to the result [False].
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002
        """Normalise; add `z` if it is given, then relu if `fuse_relu`."""
        x = input.movedim(-1, 1) if self.channel_last else input
        out = forward_on_cpu(self, x) if x.is_cpu else super().forward(x)
        out = out.movedim(1, -1) if self.channel_last else out
        out = out if z is None else out + z
        return out.relu() if self.fuse_relu else out


def forward_on_cpu(layer: torch.nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """Do what torch's forward does on a GPU alone: normalise over the batches of all processes."""
    layer._check_input_dim(x)
    group = layer.process_group
    there = dist.is_available() and dist.is_initialized()
    if not (layer.training and there and dist.get_world_size(group) > 1):
        return _BatchNorm.forward(layer, x)
    out, mean, var, count = joint_batch_norm(x, layer.weight, layer.bias, layer.eps, group)
    if layer.running_mean is not None and layer.running_var is not None:
        share = _share_of_this_batch(layer)
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        unbiased = var * (count / (count - 1))
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)
    return out


def _share_of_this_batch(layer: torch.nn.SyncBatchNorm) -> float:
    """Count the batch; return the momentum for it, as torch's batch norm does."""
    if layer.num_batches_tracked is None:
        return layer.momentum or 0.0
    layer.num_batches_tracked.add_(1)
    return 1.0 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum


def convert_syncbn_model(
    module: torch.nn.Module, process_group: Any = None, channel_last: bool = False
) -> torch.nn.Module:
    """Return the model with a SyncBatchNorm in the place of each batch norm.

    Parameters and buffers stay the same tensors, so that an optimizer may have been made before.

    Args:
        module: The model; changed in place, unless it is a batch norm itself.
        process_group: See SyncBatchNorm.
        channel_last: See SyncBatchNorm.
    """
    new = module
    if isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm):
        new = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,  # type: ignore[arg-type]
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        new._parameters, new._buffers = module._parameters, module._buffers
        new.training = module.training
    for name, child in module.named_children():
        setattr(new, name, convert_syncbn_model(child, process_group, channel_last))
    return new


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this process's group of `group_size` neighbours, for `process_group`; None for 0.

    Args:
        group_size: How many processes share their statistics; 0 for all.

    Raises:
        ValueError: The number of processes is not a multiple of `group_size`.
    """
    if group_size == 0:
        return None
    world, rank = dist.get_world_size(), dist.get_rank()
    if group_size < 0 or world % group_size:
        raise ValueError(
            f"create_syncbn_process_group: group_size is {group_size}; it must divide the number "
            f"of processes, {world}"
        )
    mine = None
    for start in range(0, world, group_size):
        # Every process must take part in making every group.
        group = dist.new_group([*range(start, start + group_size)])
        if start <= rank < start + group_size:
            mine = group
    return mine
