"""Reducer: average gradients when a script calls it, with the arguments of apex."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from apex_mp.core.flat_calls import extract_tensors, flat_dist_call
from apex_mp.masters import parallel_masters


class Reducer:
    """Average gradients over all processes when `reduce()` is called.

    Within `amp.scale_loss` call it before the block ends; with FP16_Optimizer, between
    `backward(loss, update_master_grads=False)` and `update_master_grads()`. So gradients are
    checked for inf and NaN after all processes have added theirs.

    Args:
        module_or_grads_list: A module, whose parameters and masters the constructor broadcasts from
            rank 0; or gradients, which may be nested in lists.
    """

    def __init__(self, module_or_grads_list: torch.nn.Module | Iterable[Any]) -> None:
        self.module: torch.nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            params = [param.detach() for param in self.module.parameters()]
            flat_dist_call(params, dist.broadcast, (0,))
            parallel_masters.broadcast(self.module)
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Replace each gradient by the average over all processes."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(grads, dist.all_reduce)
