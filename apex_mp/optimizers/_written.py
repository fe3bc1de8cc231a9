"""Weights that were written since the last step, and the masters that give way to them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp.core import tensors, transfers
from apex_mp.core.log import counted, warn
from apex_mp.core.masters.written_weights import differ, is_time_to_compare
from apex_mp.core.step import readback
from apex_mp.optimizers._state import MASTER

# As `_C.StepPlan.written`: the items of a `_Place`.
Written: TypeAlias = tuple[int, int, bool, bool]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a weight may have been written.

    Attributes:
        group: The number of the group.
        index: The index in it.
        was_compared: Whether it was compared with that of the last step.
        is_hidden: Whether version and address are those of the last step.
    """

    group: int
    index: int
    was_compared: bool
    is_hidden: bool


@torch.no_grad()
def take(optimizer: Any, plan: Any, before: Mapping[Tensor, Any]) -> None:
    """Copy weights to their masters where a weight is not its master rounded, and warn once.

    A split master cannot be compared: its remainder becomes 0.

    Args:
        optimizer: A fused optimizer.
        plan: The plan of its step, which was read.
        before: By parameter whose state was made for this step: its state before, or None.
    """
    places, differing = [], []
    for place in _places(optimizer, plan):
        param = optimizer.param_groups[place.group]["params"][place.index]
        if MASTER not in (before.get(param, optimizer.state[param]) or {}):
            continue  # It was made from the weight.
        master, weight = map(tensors.local_part, (optimizer.state[param][MASTER], param.detach()))
        if master.dtype == torch.int16:
            if readback.is_capturing():
                continue  # A graph would drop it in each replay.
            master.zero_()
            differs = torch.ones((), dtype=torch.bool, device=weight.device)
        else:
            differs = _replace(master, weight, place.was_compared)
        places.append(place)
        differing.append(differs)
    is_all_noted = _has(optimizer, _WARNED) and finds_hidden(optimizer)
    if places and not (is_all_noted or readback.is_capturing()):
        _note_where(differing, places, optimizer)


def _replace(master: Tensor, weight: Tensor, was_compared: bool) -> Tensor:
    """Copy a weight to its master where it was written; return whether it was, as a tensor."""
    written = []
    for part, weights in _pieces(master, weight, was_compared):
        differs = differ(part, weights, converted=not was_compared)
        part.copy_(torch.where(differs, weights, part))
        written.append(differs.any())
    return torch.stack(written).any()


def _pieces(master: Tensor, weight: Tensor, was_compared: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a master and of its weight, on the master's device."""
    if not (was_compared and master.is_contiguous() and weight.is_contiguous()):
        yield master, weight.to(master.device)
        return
    staged = None
    if master.is_cpu and transfers.is_offloadable(weight.device):
        staged = transfers.pinned(min(weight.numel(), _PIECE) * weight.element_size())
        staged = staged.view(weight.dtype)
    parts = (torch.split(each.view(-1), _PIECE) for each in (master, weight))
    for part, weights in zip(*parts, strict=True):
        if staged is not None:
            weights = staged[: weights.numel()].copy_(weights)
        size = _PIECE_ON_CPU if part.is_cpu else _PIECE
        yield from zip(torch.split(part, size), torch.split(weights, size), strict=True)


# Elements that are compared at a time, which takes some 20 bytes for each.
_PIECE_ON_CPU = 1 << 16
_PIECE = 1 << 22

# Attributes of an optimizer that are set to True.
_WARNED = "_has_warned_of_writes"
_FOUND_HIDDEN = "_has_found_hidden_writes"


def _has(optimizer: Any, name: str) -> bool:
    return name in optimizer.__dict__


def finds_hidden(optimizer: Any) -> bool:
    """Return whether an optimizer has found a write that version and address do not show."""
    return _has(optimizer, _FOUND_HIDDEN)


def _places(optimizer: Any, plan: Any) -> Iterator[_Place]:
    """Yield the weights that may have been written."""
    known = [_Place(*written) for written in plan.written]
    yield from known
    is_time = is_time_to_compare(optimizer._steps_taken) and not readback.is_capturing()
    if not (is_time or finds_hidden(optimizer)):
        return
    done = {*((place.group, place.index) for place in known), *plan.without_grad}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            master = optimizer.state.get(param, {}).get(MASTER)
            if (number, index) in done or master is None or master.dtype == torch.int16:
                continue
            yield _Place(number, index, was_compared=True, is_hidden=True)


def _note_where(differing: list[Tensor], places: list[_Place], optimizer: Any) -> None:
    """Note the weights that differ; the host does not wait for a GPU."""
    remote = [differs.device for differs in differing if not differs.is_cpu]
    if not remote:
        _note(optimizer, places, torch.stack(differing))
        return
    flags = torch.stack([tensors.copy_async(differs, remote[0]) for differs in differing])
    reference = weakref.ref(optimizer)

    def on_arrival(arrived: Tensor) -> None:
        alive = reference()
        if alive is not None:
            _note(alive, places, arrived)

    readback.submit_tensor(flags, on_arrival)


def _note(optimizer: Any, places: list[_Place], differing: Tensor) -> None:
    places_written = [place for place, flag in zip(places, differing.tolist(), strict=True) if flag]
    if any(place.is_hidden for place in places_written):
        setattr(optimizer, _FOUND_HIDDEN, True)
    if not places_written or _has(optimizer, _WARNED):
        return
    setattr(optimizer, _WARNED, True)
    first = places_written[0]
    names = optimizer.param_groups[first.group].get("param_names")
    name = names[first.index] if names else f"params[{first.group}][{first.index}]"
    others = len(places_written) - 1
    more = f" and {counted(others, 'more parameter')}" if others else ""
    warn(
        f"{optimizer._public_name}: {name}{more} changed outside of step(). Training goes on from "
        "the weights as they are; the further digits of their float32 masters are dropped",
        "weights-changed-outside-of-the-step",
    )
