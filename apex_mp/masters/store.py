"""The masters that an optimizer keeps of its 16-bit parameters, beside its state."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from apex_mp import _C
from apex_mp.core.tensors import is_wrapper, local_part, match_strides, params_of
from apex_mp.masters.codes import is_exponents
from apex_mp.masters.joined import joined, like, split
from apex_mp.masters.masters import LOW_PRECISION

# Their name in the states of a checkpoint.
MASTER = "master_param"


@dataclasses.dataclass(frozen=True)
class StateView:
    """The state of an optimizer for torch.distributed.checkpoint, which loads by the names there.

    Attributes:
        optimizer: The optimizer, which has a `MasterStore`.
    """

    optimizer: Any

    def state(self) -> dict[Any, dict[str, Any]]:
        """Return the state with masters."""
        store: MasterStore = self.optimizer._own_masters
        states: dict[Any, Any] = collections.defaultdict(dict)
        for param, state in vars(self.optimizer)["state"].items():
            saved = {name: each for name, each in state.items() if not is_exponents(name)}
            states[param] = saved
        return store.beside(states)


@dataclasses.dataclass
class StepCounts:
    """The steps of an optimizer, and its masters.

    Attributes:
        steps: The steps, skipped and refused ones included.
        params: The parameters that have a master.
        nbytes: The bytes of these masters as they are kept.
        written: Steps before which a weight was written outside; None: nobody has asked.
    """

    steps: int = 0
    params: int = 0
    nbytes: int = 0
    written: int | None = None


class MasterStore:
    """Masters by parameter: float32, or int16 remainders, which are what the weights do not hold.

    A parameter without a master here has its weight, and so has one whose master does not round to
    its weight. They are not in `optimizer.state`, where scripts reset, resize and move what they
    find.

    Attributes:
        kept: The masters and remainders.
        counts: Does not keep them alive.
    """

    def __init__(self) -> None:
        self.kept: dict[Tensor, Tensor] = {}
        self.counts = StepCounts()
        self._versions: tuple[list[Tensor], list[int]] = ([], [])
        # State and master of parameters that are in no group now, as long as these live.
        self._aside = WeakIdKeyDictionary()

    def _kept(self, param: Tensor) -> Tensor | None:
        """Return what is kept and valid: the parameter may be in float32 again, or resized."""
        kept = self.kept.get(param)
        is_valid = kept is not None and kept.shape == param.shape and needs_master(param)
        return kept if is_valid else None

    def whole_of(self, param: Tensor) -> Tensor:
        """Return a copy of the values that steps work on, in float32, or float64 for float64."""
        kept = self._kept(param)
        if kept is None:
            return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
        return joined(_beside(kept, param), kept).to(param.device)

    def opened(self, param: Tensor) -> Tensor:
        """Return the float32 master of a 16-bit parameter itself; what is written to it counts."""
        master = self.kept[param] = self.whole_of(param)
        return master

    def keep_as(
        self, param: Tensor, dtype: torch.dtype | None, device: torch.device | None = None
    ) -> None:
        """Keep a parameter's master in a form, in the parameter's memory order."""
        kept = self.kept.get(param)
        if dtype is None:
            self.kept.pop(param, None)
        elif kept is None or kept.shape != param.shape:
            if dtype == torch.int16:
                self.kept[param] = like(param, dtype, device)
            else:
                self.kept[param] = param.detach().to(device).float()
        else:
            laid: Tensor = match_strides(kept, param).to(device or param.device)
            self.kept[param] = laid if laid.dtype == dtype else _converted(laid, param)

    @torch.no_grad()
    def whole(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return float32 masters for a step, to be written; `keep` ends the step."""
        masters = {}
        for param in params:
            kept = self.kept.get(param)
            if kept is not None and _is_place(kept, param, torch.float32):
                masters[param] = joined(param, kept, out=kept)
            else:
                masters[param] = self.whole_of(param)
        return masters

    @torch.no_grad()
    def keep(self, masters: Mapping[Tensor, Tensor], *, as_remainders: bool) -> None:
        """Keep the masters of a step; as remainders, their other parts go to the weights."""
        for param, master in masters.items():
            if as_remainders:
                kept = self.kept.get(param)
                is_there = kept is not None and _is_place(kept, param, torch.int16)
                self.kept[param] = split(master, param, kept if is_there else None)
            else:
                self.kept[param] = master

    def begin_step(self) -> None:
        """Count a step."""
        self.counts.steps += 1
        if self.counts.written is not None:
            params, versions = self._versions
            self.counts.written += versions != _C.versions(params)

    def end_step(self) -> None:
        """Count masters after a step."""
        if self.counts.written is not None:
            params = [*self.kept]
            self._versions = params, _C.versions(params)
        if len(self.kept) != self.counts.params:
            self.counts.params = len(self.kept)
            self.counts.nbytes = sum(local_part(kept).nbytes for kept in self.kept.values())

    def load(self, saved: Mapping[Tensor, Tensor]) -> None:
        """Replace all masters by loaded ones; a parameter without one has its weight."""
        self.kept = {**saved}

    def saved(self, param: Tensor, *, compact: bool = False) -> Tensor | None:
        """Return a parameter's master for a checkpoint, or None."""
        kept = self._kept(param)
        if kept is None:
            return None
        return kept if compact else joined(_beside(kept, param), kept)

    def beside(self, states: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """Return states with the masters as they are kept."""
        for param, master in self.kept.items():
            states[param] = {**states.get(param, {}), MASTER: master}
        return states

    def is_weight(self, param: Tensor) -> bool:
        """Return whether a parameter's master equals its weight; the host waits."""
        if self._kept(param) is None or is_wrapper(param):  # Processes must agree on the answer.
            return self._kept(param) is None
        return torch.equal(self.whole_of(param), param.detach().float())

    # Parameters that are replaced, or taken out of their group. `optimizer` has the groups.

    def put_aside(self, optimizer: Any) -> None:
        """Put aside state and masters of what is in no group, until it comes back or is freed."""
        own = {*map(id, params_of(optimizer))}
        state = vars(optimizer).get("state", {})
        others = {id(key): key for key in (*self.kept, *state) if isinstance(key, Tensor)}
        self._versions = ([], [])
        for param in [other for key, other in others.items() if key not in own]:
            self._aside[param] = state.pop(param, None), self.kept.pop(param, None)

    def put_back(self, optimizer: Any) -> None:
        """Put back what was put aside of parameters that are in a group again."""
        if not self._aside:
            return
        state = vars(optimizer).get("state", {})
        params = params_of(optimizer)
        for param in [param for param in params if param in self._aside]:
            of_param, kept = self._aside.pop(param)  # type: ignore[no-untyped-call]
            if of_param is not None:
                state.setdefault(param, of_param)
            if kept is not None:
                self.kept.setdefault(param, kept)


def needs_master(param: Tensor) -> bool:
    """Return whether a parameter is one that gets a master."""
    return param.dtype in LOW_PRECISION


def has_master(param: Tensor, group: Mapping[str, Any], optimizer: Any) -> bool:
    """Return whether an optimizer keeps a master of a parameter that is in a group."""
    keeps = group.get("master_weights") or getattr(optimizer, "has_all_masters", False)
    return needs_master(param) and bool(keeps)


def master_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in which the options of a group keep a parameter's master.

    Returns:
        float32; int16 for a remainder, which is the part of the master that the parameter does not
        hold; None for no master.
    """
    masters = group.get("master_weights")
    if not masters or param.dtype not in LOW_PRECISION:
        return None
    return torch.float32 if masters == "float32" else torch.int16


def _is_place(kept: Tensor, param: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a parameter's master or remainder can be written there."""
    like_param = (param.shape, param.stride(), param.device, dtype)
    return (kept.shape, kept.stride(), kept.device, kept.dtype) == like_param


def _beside(kept: Tensor, param: Tensor) -> Tensor:
    """Return a parameter where its master is: itself, or a copy in host memory."""
    return param if kept.device == param.device else param.detach().to(kept.device)


def _converted(kept: Tensor, param: Tensor) -> Tensor:
    """Return a master in the other form, in the memory order of its parameter."""
    weight = _beside(kept, param)
    whole = joined(weight, kept)
    if kept.dtype == torch.int16:
        return whole
    remainder = split(whole, weight)
    if weight is not param:
        param.detach().copy_(weight)
    return remainder


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
