"""A fused optimizer inside torch's ZeroRedundancyOptimizer steps a part of the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from apex_mp.core.checkpoints.checkpoint_view import caller_of
from apex_mp.core.grads.found_inf import FoundInf
from apex_mp.core.step.scaled_step import Groups, ScaledStep
from apex_mp.optimizers._state import Rule

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def zero_group() -> Any:
    """Return the processes among which ZeroRedundancyOptimizer divides parameters, or None.

    It makes the optimizer inside, which gets no word of it.
    """
    frame = caller_of(_ZERO)
    group = None if frame is None else getattr(frame.f_locals.get("self"), "process_group", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


@torch.no_grad()
def give_whole_norms(step: ScaledStep, groups: Groups, rule: Rule, processes: Any) -> None:
    """Set the norms by which a step clips to those of the parts of all processes.

    There is one collective, of a number for each group, if a group is clipped.

    Args:
        step: The step; its norms are set.
        groups: The groups, whose options are the same in all processes.
        rule: The optimizer's rule.
        processes: The process group.
    """
    if step.norms is not None or not any(group.get("max_grad_norm") for group in groups):
        return
    lists = step.grads or [[param.grad for param in group["params"]] for group in groups]
    found = FoundInf()
    found.check_lists(lists)
    on_gpu = dist.get_backend(processes) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    of_groups = torch.split(found.sums_on(device), [len(grads) for grads in lists])
    sums = torch.stack([each.sum() for each in of_groups])
    dist.all_reduce(sums, group=processes)
    norms = sums.sum().expand(len(groups)) if rule.clips_by_global_norm else sums
    step.norms, step.has_whole_norms = [*norms.sqrt().unbind()], True
