"""Which parameters have gradients that are not averaged over processes, because of `no_sync`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# For each model whether its last forward was in `no_sync`; where backward runs does not count.
_was_local: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()
# For each module that was called: the DistributedDataParallel models in it, itself included.
_inside: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[DistributedDataParallel]]] = (
    weakref.WeakKeyDictionary()
)


def note_forward(model: DistributedDataParallel, *, is_local: bool) -> None:
    """Note a forward that a backward may follow."""
    _was_local[model] = is_local


def note_call(module: torch.nn.Module) -> None:
    """Note a call of a module that is, or contains, a DistributedDataParallel of torch."""
    inside = _inside.get(module)
    if inside is None:
        inside = _inside[module] = [
            weakref.ref(each)
            for each in module.modules()
            if isinstance(each, DistributedDataParallel) and not _is_ours(each)
        ]
    for reference in inside:
        model = reference()
        if model is not None and torch.is_grad_enabled():
            _note_torchs(model)


def note_active() -> DistributedDataParallel | None:
    """Note the current forward; return the model if it is torch's and this is its first forward."""
    active = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if active is None or _is_ours(active):
        return None
    is_new = active not in _was_local
    _note_torchs(active)
    return active if is_new else None


def has_unsynced_grads(params: Iterable[Tensor]) -> bool:
    """Return whether backward gives one of these a gradient that is not averaged over processes.

    That is so after a forward within `no_sync`, and after `disable_allreduce`.
    """
    if not _was_local:
        return False
    local = [model for model, was_local in [*_was_local.items()] if was_local or _is_off(model)]
    if not local:
        return False
    theirs = {id(param) for model in local for param in model.parameters()}
    return any(id(param) in theirs for param in params)


def _note_torchs(model: DistributedDataParallel) -> None:
    note_forward(model, is_local=not model.require_backward_grad_sync)


def _is_ours(model: DistributedDataParallel) -> bool:
    return hasattr(model, "allreduce_is_enabled")


def _is_off(model: DistributedDataParallel) -> bool:
    return not getattr(model, "allreduce_is_enabled", True)
