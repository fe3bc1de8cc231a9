"""Which parameters have gradients of this process alone now, because a model is in `no_sync`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def note(*models: DistributedDataParallel) -> None:
    """Know of models from now on; as long as they are there."""
    _models.update(models)


def note_active() -> DistributedDataParallel | None:
    """Know of the model whose forward is running; return it if it is there and new."""
    active = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if active is None or active in _models:
        return None
    note(active)
    return active  # type: ignore[no-any-return]


def stay_here(params: Iterable[Tensor]) -> bool:
    """Tell whether backward leaves a gradient to one of these that other processes do not add to.

    It is so within `no_sync`, and after `disable_allreduce`.
    """
    local = [model for model in _models if not _synchronises(model)]
    if not local:
        return False
    theirs = {id(param) for model in local for param in model.parameters()}
    return any(id(param) in theirs for param in params)


def _synchronises(model: DistributedDataParallel) -> bool:
    is_on: bool = getattr(model, "allreduce_is_enabled", True)
    # Of `no_sync`, the forward counts; a model of torch's does not tell what it was.
    is_local: bool = getattr(model, "last_forward_was_local", False)
    return is_on and not is_local and model.require_backward_grad_sync
