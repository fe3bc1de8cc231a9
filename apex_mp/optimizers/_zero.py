"""A fused optimizer inside torch's ZeroRedundancyOptimizer steps a part of the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apex_mp.core.checkpoints.checkpoint_view import caller_of

ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def zero_group() -> Any:
    """Return the processes among which ZeroRedundancyOptimizer divides parameters, or None.

    It makes the optimizer inside, which gets no word of it.
    """
    frame = caller_of(ZERO)
    group = None if frame is None else getattr(frame.f_locals.get("self"), "process_group", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


def whole_norms(norms: Tensor, processes: Any) -> Tensor:
    """Return the norms of the parts in all processes, on any device, by one collective."""
    on_gpu = dist.get_backend(processes) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    squares = norms.square().to(device)
    dist.all_reduce(squares, group=processes)
    return squares.sqrt()
