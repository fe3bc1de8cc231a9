"""float32 masters follow the model when the parameters of rank 0 become those of all processes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from apex_mp.parallel.flat_calls import flat_dist_call


class Holder(Protocol):
    """Who has masters."""

    def masters_of(self, params: Collection[int]) -> list[Tensor]:
        """Return masters of the parameters with these id()s, in an order that all ranks have."""


# In the order in which they were made, which is the same in all processes.
_holders: list[weakref.ref[Any]] = []


def add(holder: Holder) -> None:
    """Know of somebody who has masters, as long as he is there."""
    _holders[:] = [each for each in _holders if each() is not None]
    _holders.append(weakref.ref(holder))


def broadcast(module: torch.nn.Module, group: Any = None) -> None:
    """Give all processes of a group the masters that its first one has of a model.

    Without it they would keep what each process had initialised, and write that to the model in
    the first step.
    """
    gc.collect()  # A holder that nobody has any more would be there in one process only.
    params = {id(param) for param in module.parameters()}
    alive = [holder for each in _holders if (holder := each()) is not None]
    masters = [master for holder in alive for master in holder.masters_of(params)]
    _check_all_have_as_many(masters, module, group)
    first = 0 if group is None else dist.get_global_rank(group, 0)
    flat_dist_call([master.detach() for master in masters], dist.broadcast, (first, group))


def _check_all_have_as_many(masters: list[Tensor], module: torch.nn.Module, group: Any) -> None:
    """Refuse, in all processes alike, what would wait for ever or mix up masters."""
    param = next(module.parameters(), None)
    if param is None:
        return
    count = sum(master.numel() for master in masters)
    least = torch.tensor([count, -count], device=param.device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    if least[0] != -least[1]:
        raise RuntimeError(
            f"parallel: this process has float32 masters with {count} elements of the model's "
            f"parameters, and another has {least[0]} to {-least[1]}; make the same optimizers in "
            "all processes before the model becomes parallel"
        )
