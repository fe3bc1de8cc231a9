"""Steps of torch's own fused optimizers, which read `found_inf` and `grad_scale` on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp.grad_scaling.folded_clip import params_of
from apex_mp.core.step import readback
from apex_mp.optimizers._fused import FusedOptimizer

_MOMENTUM = "momentum_buffer"


def is_fused(optimizer: Any) -> bool:
    """Return whether an optimizer unscales and skips in its own step: ours, torch's fused ones."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def looks_at_found_inf(optimizer: Any) -> bool:
    """Return whether a step of the optimizer changes nothing if its found_inf is 1."""
    return is_fused(optimizer) and next(_without_momentum(optimizer), None) is None


def _without_momentum(optimizer: Any) -> Iterator[Tensor]:
    """Yield parameters whose first step, by torch's SGD, makes momentum before it reads found_inf.

    A step that is skipped leaves that momentum without values.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else ():
            has_momentum = optimizer.state.get(param, {}).get(_MOMENTUM) is not None
            if param.requires_grad and not has_momentum:
                yield param


@contextlib.contextmanager
def removing_new_momentum(optimizer: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Remove the momentum that a skipped first step has made, without values; there the host waits.

    Args:
        optimizer: The optimizer; its step is called in the block.
        state: torch's state of the optimizer, in which that step finds or puts the flags of inf.
    """
    new = [param for param in _without_momentum(optimizer) if param.grad is not None]
    if not new or readback.is_capturing():
        yield
        return
    yield
    if any(found.item() for found in state["found_inf_per_device"].values()):
        for param in new:
            optimizer.state.pop(param, None)


@contextlib.contextmanager
def wait_for_amp_tensors(optimizer: Any, device: torch.device) -> Iterator[None]:
    """Move `grad_scale` and `found_inf` to the CPU for torch's fused optimizers that step there.

    torch copies both with non_blocking=True, and a step on the CPU may read them before they
    arrive.

    Args:
        optimizer: The optimizer; its step is called in the block.
        device: That of the scale.
    """
    if (
        device.type == "cpu"
        or isinstance(optimizer, FusedOptimizer)
        or not any(param.is_cpu for param in params_of(optimizer))
    ):
        yield
        return

    def move_to_cpu(optimizer: Any, args: Any, kwargs: Any) -> None:
        for name in ("grad_scale", "found_inf"):
            value = getattr(optimizer, name, None)
            setattr(optimizer, name, None if value is None else value.cpu())

    hook = optimizer.register_step_pre_hook(move_to_cpu)
    try:
        yield
    finally:
        hook.remove()
