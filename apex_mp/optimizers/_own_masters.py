"""The float32 masters that `MasterWeights` keeps for the 16-bit parameters of an optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.core.log import counted, warn
from apex_mp.core.masters.exchange import exchanged
from apex_mp.core.masters.masters import LOW_PRECISION
from apex_mp.core.masters.written_weights import current, is_time_to_compare
from apex_mp.optimizers import _state


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
        self._known: dict[Tensor, tuple[int, int]] = {}  # version and address after a step
        self._has_warned = self._has_found_hidden = False

    @torch.no_grad()
    def whole(
        self, params: Sequence[Tensor], named: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> dict[Tensor, Tensor]:
        """Return float32 masters for a step; where a weight was written since, it wins.

        Args:
            params: 16-bit parameters; those without a master get one.
            named: Returns parameters and their names, for a warning.
        """
        masters: dict[Tensor, Tensor] = {}
        written: list[Tensor] = []
        compares = self._has_found_hidden or is_time_to_compare(self.counts.steps - 1)
        for param, place in self._places(params):
            kept, known = self.kept.get(param), self._known.get(param)
            if kept is None:
                masters[param] = param.detach().float()
            elif _is_remainder(kept):
                masters[param] = _state.joined(param, kept)
                if known is not None and known != place:
                    masters[param] = param.detach().float()
                    written.append(param)
            elif known == place and not compares:
                masters[param] = kept
            else:
                masters[param] = current(kept, param)
                if masters[param].data_ptr() != kept.data_ptr():
                    written.append(param)
                    self._has_found_hidden |= known == place
        if written and not self._has_warned:
            self._has_warned = True
            _warn_of_writes(written, named())
        return masters

    @torch.no_grad()
    def keep(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Keep the masters of a step, after they were rounded to the weights."""
        for param, master in masters.items():
            self.kept[param] = self._split(master, param) if self.split else master
        self._known.update(self._places([*masters]))
        if len(self.kept) != self.counts.params:
            self.counts.params = len(self.kept)
            self.counts.elements = sum(kept.numel() for kept in self.kept.values())

    def _split(self, master: Tensor, param: Tensor) -> Tensor:
        kept = self.kept.get(param)
        is_there = kept is not None and _is_remainder(kept)
        return _state.split(master, param, kept if is_there else None)

    def load(self, saved: Mapping[Tensor, Tensor], *, compares_all: bool = False) -> None:
        """Replace all masters by loaded ones; a parameter without one has its weight.

        Args:
            saved: Masters by parameter.
            compares_all: Compare all weights with their masters in each step from now on [False].
        """
        self.kept, self._known, self.stepped = {**saved}, {}, {*saved}
        self._has_found_hidden |= compares_all

    def whole_of(self, param: Tensor) -> Tensor:
        """Return the float32 values of a parameter's master now, maybe in the memory of it."""
        kept = self.kept.get(param)
        if kept is None:
            return param.detach().float()
        return _whole(param, kept) if _is_remainder(kept) else current(kept, param)

    def replace(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Replace the masters of some parameters."""
        self.kept.update(masters)
        for param in masters:
            self._known.pop(param, None)

    def saved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter and its master in float32."""
        for param, kept in self.kept.items():
            if needs_master(param):  # Else it is in float32 again.
                yield param, _whole(param, kept)

    def _places(self, params: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        versions = _C.versions([*params])
        addresses = (tensors.local_part(param).data_ptr() for param in params)
        return zip(params, zip(versions, addresses, strict=True), strict=True)


def needs_master(param: Tensor) -> bool:
    """Return whether a parameter is one that gets a master."""
    return param.dtype in LOW_PRECISION


def _whole(param: Tensor, kept: Tensor) -> Tensor:
    return _state.joined(param, kept) if _is_remainder(kept) else kept


def _is_remainder(kept: Tensor) -> bool:
    return kept.dtype == torch.int16


def _warn_of_writes(written: list[Tensor], named: Iterable[tuple[str, Tensor]]) -> None:
    first = next((name for name, param in named if param is written[0]), "a parameter")
    more = f" and {counted(len(written) - 1, 'more parameter')}" if len(written) > 1 else ""
    warn(
        f"MasterWeights: {first}{more} changed since the last step, outside of the optimizer; the "
        "float32 masters were set to the new weights. To load weights and masters, load the "
        "model's state_dict and the optimizer's",
        "weights-changed-outside-of-the-step",
    )


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
