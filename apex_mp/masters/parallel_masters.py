"""Broadcast masters and loss scales when a model's parameters are broadcast."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from apex_mp.core.flat_calls import flat_dist_call
from apex_mp.masters.store import MasterStore, has_master


class Holder(Protocol):
    """An object that has masters."""

    def masters_of(self, params: Collection[int]) -> list[Tensor]:
        """Return masters of the parameters with these id()s, in an order that all ranks have."""


# In the order in which they were made, which is the same in all processes.
_holders: list[weakref.ref[Any]] = []


def add(holder: Holder) -> None:
    """Register a holder of master parameters (weakly)."""
    follow_join()
    _holders[:] = [each for each in _holders if each() is not None]
    _holders.append(weakref.ref(holder))


# Optimizers with a `MasterStore`, likewise.
_optimizers: list[weakref.ref[Any]] = []


def add_optimizer(optimizer: Any) -> None:
    """Register an optimizer that has a `MasterStore` (weakly)."""
    follow_join()
    _optimizers[:] = [each for each in _optimizers if each() is not None]
    _optimizers.append(weakref.ref(optimizer))


# For each owner of a loss scale: how to get the scaler, and the optimizers that it scales for.
_scales: weakref.WeakKeyDictionary[Any, tuple[Callable[[Any], Any], weakref.WeakSet[Any]]]
_scales = weakref.WeakKeyDictionary()


def add_scale(owner: Any, scaler_of: Callable[[Any], Any], optimizers: Iterable[Any]) -> None:
    """Register the owner of a loss scale (weakly); more optimizers may come later."""
    known = _scales.get(owner)
    if known is None:
        known = _scales[owner] = scaler_of, weakref.WeakSet()
    known[1].update(optimizers)


def broadcast(module: torch.nn.Module, group: Any = None, source: int | None = None) -> None:
    """Broadcast the masters of a model from one process to all others of a group.

    Otherwise each process would keep its own initial masters, and write them to the model in the
    first step.
    """
    masters = _masters(module)
    _check_all_have_as_many(masters, module, group)
    flat_dist_call(
        [master.detach() for master in masters], dist.broadcast, (_source(group, source), group)
    )


@torch.no_grad()
def broadcast_stores(module: torch.nn.Module, group: Any, source: int) -> None:
    """Broadcast the masters that optimizers keep in a `MasterStore`, one after another."""
    own = {id(param) for param in module.parameters()}
    pairs: list[tuple[MasterStore, Tensor]] = []
    for optimizer in [found for each in _optimizers if (found := each()) is not None]:
        optimizer._own_masters.put_back(optimizer)
        pairs += [
            (optimizer._own_masters, param)
            for param_group in optimizer.param_groups
            for param in param_group["params"]
            if id(param) in own and has_master(param, param_group, optimizer)
        ]
    _check_all_have_as_many([param for _, param in pairs], module, group)
    for store, param in pairs:
        kept, master = store.kept.get(param), store.whole_of(param)
        dist.broadcast(master, source, group)
        is_whole = kept is not None and kept.dtype == torch.float32
        store.keep({param: master}, as_remainders=not is_whole)


def broadcast_scales(module: torch.nn.Module, group: Any, source: int) -> None:
    """Broadcast the loss scales of a model's gradients; the number of scales must be the same."""
    stepped = {id(param) for param in (*module.parameters(), *_masters(module))}
    scalers = [
        scaler_of(owner)
        for owner, (scaler_of, optimizers) in [*_scales.items()]
        if any(
            id(param) in stepped
            for optimizer in optimizers
            for param_group in optimizer.param_groups
            for param in param_group["params"]
        )
    ]
    states = [[scaler.state_dict() for scaler in scalers]]
    dist.broadcast_object_list(states, source, group)
    if len(states[0]) != len(scalers):
        raise RuntimeError(
            f"parallel: this process has {len(scalers)} loss scales for the model, and rank "
            f"{source} has {len(states[0])}; they cannot be made equal"
        )
    for scaler, state in zip(scalers, states[0], strict=True):
        scaler.load_state_dict(state)


class FollowingJoinHook(JoinHook):
    """Runs torch's hook, then broadcasts masters and loss scales from the process torch chose.

    Processes with fewer batches took fewer steps. torch makes their weights equal at the end, but
    old masters would undo that in the next step, and a loss scale of its own would give a
    process's gradients a wrong weight in each average.

    Args:
        model: The parallel model.
        hook: torch's hook.
    """

    def __init__(self, model: DistributedDataParallel, hook: JoinHook) -> None:
        self._model = model
        self._hook = hook

    def main_hook(self) -> None:
        """Run torch's hook: take part in the collectives of the other processes."""
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make weights, masters and loss scales equal."""
        self._hook.post_hook(is_last_joiner)
        model = self._model
        group = model.process_group
        last = torch.tensor([dist.get_rank() if is_last_joiner else -1], device=model.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)  # As torch chooses.
        source = int(last.item())
        broadcast(model.module, group, source)
        broadcast_stores(model.module, group, source)
        broadcast_scales(model.module, group, source)


_torchs_join_hook = DistributedDataParallel.join_hook


@functools.wraps(_torchs_join_hook)
def _join_hook(self: DistributedDataParallel, **kwargs: Any) -> JoinHook:
    return FollowingJoinHook(self, _torchs_join_hook(self, **kwargs))  # type: ignore[no-untyped-call]


def follow_join() -> None:
    """Change DistributedDataParallel so that `join()` makes masters and loss scales equal, too.

    All processes of a script set up mixed precision, and each of these calls comes here. torch has
    no list of hooks for `join()`, and a process without batches calls no forward, so the class is
    changed.
    """
    if DistributedDataParallel.join_hook is _torchs_join_hook:
        DistributedDataParallel.join_hook = _join_hook  # type: ignore[method-assign]


def _masters(module: torch.nn.Module) -> list[Tensor]:
    gc.collect()  # A holder without references could still exist in one process only.
    params = {id(param) for param in module.parameters()}
    alive = [holder for each in _holders if (holder := each()) is not None]
    return [master for holder in alive for master in holder.masters_of(params)]


def _source(group: Any, source: int | None) -> int:
    if source is not None:
        return source
    return 0 if group is None else dist.get_global_rank(group, 0)


def _check_all_have_as_many(masters: list[Tensor], module: torch.nn.Module, group: Any) -> None:
    """Raise in all processes if numbers of masters differ: a broadcast would hang."""
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
