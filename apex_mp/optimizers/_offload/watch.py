"""Weights that were written since the last step, where their masters are in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core.masters.masters import LOW_PRECISION
from apex_mp.optimizers._device_part import Places
from apex_mp.optimizers._offload.pieces import Items
from apex_mp.optimizers._state import MASTER
from apex_mp.optimizers._written import Written


class WeightWatch:
    """Knows weights and their masters again, by addresses and counts of writes."""

    def __init__(self) -> None:
        self._facts: list[list[Any]] = []  # after the last step; see `_facts_of`

    def note(self, items: Items, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Remember weights and masters after a step."""
        self._facts = _facts_of(*_with_masters(items, states)[1:])

    def find(self, items: Items, states: Mapping[Tensor, dict[str, Any]]) -> list[Written]:
        """Return the weights that were written since, as `_C.StepPlan.written`."""
        places, params, masters = _with_masters(items, states)
        facts = _facts_of(params, masters)
        if facts == self._facts:
            return []
        before = {one[0]: one for one in zip(*self._facts, strict=True)}
        found = []
        for place, master, now in zip(places, masters, zip(*facts, strict=True), strict=True):
            known, is_split = before.get(now[0]), master.dtype == torch.int16
            if known is None or known[1:3] != now[1:3]:
                if not is_split:  # A new remainder belongs to the weight that it came with.
                    found.append((*place, False, False))
                continue
            # So does one that was written.
            is_pair = is_split and known[5] != now[5]
            if known[3:5] != now[3:5] and not is_pair:
                found.append((*place, True, False))
        return found


def _with_masters(
    items: Items, states: Mapping[Tensor, dict[str, Any]]
) -> tuple[Places, list[Tensor], list[Tensor]]:
    """Return places, parameters and masters of the parameters that have a master."""
    all_masters: list[Any] = [states.get(param, {}).get(MASTER) for param in items.params]
    rows = zip(items.places, items.params, all_masters, strict=True)
    found = [row for row in rows if row[2] is not None and row[1].dtype in LOW_PRECISION]
    places, params, masters = zip(*found, strict=True) if found else ((), (), ())
    return [*places], [*params], [*masters]


def _facts_of(params: list[Tensor], masters: list[Tensor]) -> list[list[Any]]:
    """Return lists: id, dtype, master's address; weight's address and version; master's version."""
    return [
        [id(param) for param in params],
        [param.dtype for param in params],
        [master.data_ptr() for master in masters],
        [param.data_ptr() for param in params],
        _C.versions(params),
        _C.versions(masters),
    ]
