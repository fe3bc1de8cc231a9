"""SyncBatchNorm with the arguments of apex, over torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from apex_mp.parallel._joint_batch_norm import joint_batch_norm


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
        if not (self.training and self._has_others()):
            out = self._alone(x)
        elif x.device.type == "cpu":
            out = self._together_on_cpu(x)
        else:
            out = super().forward(x)
        out = out.movedim(1, -1) if self.channel_last else out
        out = out if z is None else out + z
        return out.relu() if self.fuse_relu else out

    def _alone(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        return _BatchNorm.forward(self, x)

    def _has_others(self) -> bool:
        there = dist.is_available() and dist.is_initialized()
        return there and dist.get_world_size(self.process_group) > 1

    def _together_on_cpu(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        out, mean, var, count = joint_batch_norm(
            x, self.weight, self.bias, self.eps, self.process_group
        )
        if self.running_mean is not None and self.running_var is not None:
            share = self._share_of_this_batch()
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = var * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return out

    def _share_of_this_batch(self) -> float:
        """Count the batch; return the momentum for it, as torch's batch norm does."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum


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


def needs_torchs_check(module: torch.nn.Module) -> bool:
    """Return whether a model has a batch norm that only torch can synchronize, and only on GPUs."""
    return any(
        isinstance(layer, torch.nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm)
        for layer in module.modules()
    )


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
