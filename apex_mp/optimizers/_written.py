"""Weights that were written since the last step, and the masters that give way to them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.log import counted, warn
from apex_mp.core.masters.written_weights import differ
from apex_mp.core.step import readback
from apex_mp.optimizers._state import MASTER

# Group, index, and whether the weight was compared with that of the last step.
Written: TypeAlias = tuple[int, int, bool]


@torch.no_grad()
def take(optimizer: Any, written: Sequence[Written], before: Mapping[Tensor, Any]) -> None:
    """Copy weights to their masters where a weight is not its master rounded, and warn once.

    A split master cannot be compared: its remainder becomes 0.

    Args:
        optimizer: A fused optimizer.
        written: The weights that may have been written.
        before: By parameter whose state was made for this step: its state before, or None.
    """
    places, differing = [], []
    for number, index, was_compared in written:
        param = optimizer.param_groups[number]["params"][index]
        if MASTER not in (before.get(param, optimizer.state[param]) or {}):
            continue  # It was made from the weight.
        master, weight = map(tensors.local_part, (optimizer.state[param][MASTER], param.detach()))
        if master.dtype == torch.int16:
            if readback.is_capturing():
                continue  # A graph would drop it in each replay.
            master.zero_()
            differs = torch.ones((), dtype=torch.bool, device=weight.device)
        else:
            differs = differ(master, weight, converted=not was_compared)
            master.copy_(torch.where(differs, weight, master))
        places.append((number, index))
        differing.append(differs.any())
    if places and not (optimizer.__dict__.get("_has_warned_of_writes") or readback.is_capturing()):
        _warn_where(differing, places, optimizer)


def _warn_where(differing: list[Tensor], places: list[tuple[int, int]], optimizer: Any) -> None:
    """Warn of the weights that differ; the host does not wait for a GPU."""
    remote = [differs.device for differs in differing if not differs.is_cpu]
    if not remote:
        _warn(optimizer, places, torch.stack(differing))
        return
    flags = torch.stack([tensors.copy_async(differs, remote[0]) for differs in differing])
    reference = weakref.ref(optimizer)

    def on_arrival(arrived: Tensor) -> None:
        alive = reference()
        if alive is not None:
            _warn(alive, places, arrived)

    readback.submit_tensor(flags, on_arrival)


def _warn(optimizer: Any, places: list[tuple[int, int]], differing: Tensor) -> None:
    places_written = [place for place, flag in zip(places, differing.tolist(), strict=True) if flag]
    if not places_written or optimizer.__dict__.get("_has_warned_of_writes"):
        return
    optimizer._has_warned_of_writes = True
    number, index = places_written[0]
    names = optimizer.param_groups[number].get("param_names")
    name = names[index] if names else f"params[{number}][{index}]"
    others = len(places_written) - 1
    more = f" and {counted(others, 'more parameter')}" if others else ""
    warn(
        f"{optimizer._public_name}: {name}{more} changed outside of step(). Training goes on from "
        "the weights as they are; the further digits of their float32 masters are dropped",
        "weights-changed-outside-of-the-step",
    )
