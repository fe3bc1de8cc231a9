"""The float32 masters that `MasterWeights` keeps for the 16-bit parameters of an optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.masters.exchange import exchanged
from apex_mp.core.masters.joined import joined, split
from apex_mp.core.masters.masters import LOW_PRECISION


@dataclasses.dataclass
class StepCounts:
    """The steps of an optimizer, and its masters.

    Attributes:
        owner: The optimizer's class.
        bytes_each: Bytes of a master's element between steps.
        steps: The steps, skipped ones included.
        skipped: Those that were skipped.
        params: The parameters that have a master.
        elements: Their elements.
    """

    owner: str
    bytes_each: int
    steps: int = 0
    skipped: int = 0
    params: int = 0
    elements: int = 0


class OwnMasters:
    """Masters by parameter: float32 tensors, or remainders of 2 bytes beside the weights.

    Args:
        owner: The optimizer's class.
        split: Keep remainders between steps.

    Attributes:
        counts: What was stepped; it does not keep the masters alive.
        kept: The master or remainder of each parameter that has one.
        stepped: Those that had a gradient in a step, or a master in a checkpoint.
    """

    def __init__(self, owner: str, split: bool) -> None:
        self.split = split
        self.counts = StepCounts(owner, 2 if split else 4)
        self.kept: dict[Tensor, Tensor] = {}
        self.stepped: set[Tensor] = set()

    @torch.no_grad()
    def whole(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return float32 masters for a step; 16-bit parameters without a master get one."""
        return {param: self._now(param, in_place=True) for param in params}

    def _now(self, param: Tensor, *, in_place: bool = False) -> Tensor:
        kept = self.kept.get(param)
        if kept is None:
            return param.detach().float()
        has_place = in_place and not _is_remainder(kept) and kept.stride() == param.stride()
        return joined(param, kept, out=kept if has_place else None)

    @torch.no_grad()
    def keep(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Keep the masters of a step, after they were rounded to the weights."""
        for param, master in masters.items():
            self.kept[param] = self._split(master, param) if self.split else master
        if len(self.kept) != self.counts.params:
            self.counts.params = len(self.kept)
            self.counts.elements = sum(kept.numel() for kept in self.kept.values())

    def _split(self, master: Tensor, param: Tensor) -> Tensor:
        kept = self.kept.get(param)
        is_there = kept is not None and _is_remainder(kept)
        return split(master, param, kept if is_there else None)

    def load(self, saved: Mapping[Tensor, Tensor]) -> None:
        """Replace all masters by loaded ones; a parameter without one has its weight.

        Args:
            saved: Masters by parameter.
        """
        self.kept, self.stepped = {**saved}, {*saved}

    def whole_of(self, param: Tensor) -> Tensor:
        """Return a copy of a parameter's master in float32."""
        return self._now(param)

    def replace(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Replace the masters of some parameters."""
        self.kept.update(masters)

    def saved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter and its master in float32."""
        for param in self.kept:
            if needs_master(param):  # Else it is in float32 again.
                yield param, self._now(param)


def needs_master(param: Tensor) -> bool:
    """Return whether a parameter is one that gets a master."""
    return param.dtype in LOW_PRECISION


def _is_remainder(kept: Tensor) -> bool:
    return kept.dtype == torch.int16


def listed(params: Any) -> Any:
    """Return what an optimizer takes as parameters, with each iterator as a list."""
    if isinstance(params, Mapping):
        return {**params, "params": listed(params["params"])} if "params" in params else params
    return [*map(listed, params)] if isinstance(params, (list, Iterator)) else params


def low_params(params: Any) -> Iterator[Tensor]:
    """Yield the 16-bit parameters among what an optimizer takes as parameters."""
    if isinstance(params, Tensor):
        if needs_master(params):
            yield params
        return
    if isinstance(params, Mapping):
        params = params.get("params", ())
    for each in params if isinstance(params, (list, tuple)) else ():
        yield from low_params(each)


def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method, of a schedule-free optimizer, that changes parameters in float32 as well."""

    @functools.wraps(method)
    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        masters = optimizer._masters_for_step()
        with torch.no_grad(), exchanged(masters, {}):
            result = method(optimizer, *args, **kwargs)
        optimizer._write_masters(masters)
        return result

    return call
