"""The end of `join()`: all processes get the masters and loss scales of the last one."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from apex_mp.parallel import followers


class FollowingJoinHook(JoinHook):
    """Runs torch's hook, then broadcasts masters and loss scales from the process torch chose.

    Processes with fewer batches took fewer steps. torch makes their weights equal at the end. Their
    masters would undo that in the next step, and another loss scale would weigh their gradients
    wrongly in each average.

    Args:
        model: The parallel model.
        hook: torch's.
    """

    def __init__(self, model: DistributedDataParallel, hook: JoinHook) -> None:
        self._model = model
        self._hook = hook

    def main_hook(self) -> None:
        """Take part in the collectives of the other processes."""
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make weights, masters and loss scales equal."""
        self._hook.post_hook(is_last_joiner)
        model = self._model
        group = model.process_group
        last = torch.tensor([dist.get_rank() if is_last_joiner else -1], device=model.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)  # As torch chooses.
        source = int(last.item())
        followers.broadcast(model.module, group, source)
        followers.broadcast_scales(model.module, group, source)
