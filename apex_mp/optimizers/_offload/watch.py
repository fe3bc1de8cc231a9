"""Weights that were written since the last step, where their masters are in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
        # By id of the parameter, after its last step.
        self._known: dict[int, _Facts] = {}

    def note(self, items: Items, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Remember weights and masters after a step."""
        _, params, masters = _with_masters(items, states)
        self._known.update(zip(map(id, params), _facts_of(params, masters), strict=True))

    def find(self, items: Items, states: Mapping[Tensor, dict[str, Any]]) -> list[Written]:
        """Return the weights that were written since, as `_C.StepPlan.written`."""
        places, params, masters = _with_masters(items, states)
        found = []
        rows = zip(places, params, masters, _facts_of(params, masters), strict=True)
        for place, param, master, now in rows:
            known, is_split = self._known.get(id(param)), master.dtype == torch.int16
            if known == now:
                continue
            if known is None or known.master != now.master:
                if not is_split:  # A new remainder belongs to the weight that it came with.
                    found.append((*place, False, False))
            elif known.dtype != now.dtype and not is_split:
                found.append((*place, False, False))
            # A remainder that was written belongs to the weight that it was written with.
            elif known[:3] != now[:3] and not (
                is_split and known.master_version != now.master_version
            ):
                found.append((*place, True, False))
        return found


class _Facts(NamedTuple):
    """By what a weight and its master are known: addresses, and counts of writes."""

    dtype: torch.dtype
    weight: int
    version: int
    master: int
    master_version: int


def _with_masters(
    items: Items, states: Mapping[Tensor, dict[str, Any]]
) -> tuple[Places, list[Tensor], list[Tensor]]:
    """Return places, parameters and masters of the parameters that have a master."""
    all_masters: list[Any] = [states.get(param, {}).get(MASTER) for param in items.params]
    rows = zip(items.places, items.params, all_masters, strict=True)
    found = [row for row in rows if row[2] is not None and row[1].dtype in LOW_PRECISION]
    places, params, masters = zip(*found, strict=True) if found else ((), (), ())
    return [*places], [*params], [*masters]


def _facts_of(params: list[Tensor], masters: list[Tensor]) -> Iterator[_Facts]:
    versions = zip(_C.versions(params), _C.versions(masters), strict=True)
    for param, master, (version, master_version) in zip(params, masters, versions, strict=True):
        yield _Facts(param.dtype, param.data_ptr(), version, master.data_ptr(), master_version)
