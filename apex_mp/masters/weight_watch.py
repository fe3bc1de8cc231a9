"""Detect weights that differ from their masters: written by others, or out of range."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import ClassVar

import torch
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.core import readback
from apex_mp.core.log import counted, warn
from apex_mp.grads import found_inf
from apex_mp.masters.joined import differ
from apex_mp.masters.masters import Masters

_SAMPLES = 256
_FLOAT16_OVERFLOW = 65520.0  # Less rounds to 65504, the largest float16.


class WeightWatch:
    """Warns once of writes to weights that a step overwrites, once of masters beyond float16.

    Each step compares the tensor versions of up to 256 parameters. On the CPU it also compares the
    norms of all, which a write through `.data` changes too, but only after 0, 1, 2, 4, 8, ...
    steps, so that their cost vanishes.

    Args:
        caller: The class or function, for the message.
        masters: The masters and their model parameters.
        name_of: Returns the name of a master.
        advice: What to do instead of writing to the model.
    """

    _all: ClassVar[weakref.WeakSet[WeightWatch]] = weakref.WeakSet()

    def __init__(
        self, caller: str, masters: Masters, name_of: Callable[[Parameter], str], advice: str
    ) -> None:
        self._caller = caller
        self._masters = masters
        self._name_of = name_of
        self._advice = advice
        self._steps = 0
        self._sample: list[Parameter] = []
        self._versions: list[int] = []
        self._master_versions: dict[Parameter, int] = {}
        self._norms: dict[Parameter, float] = {}
        self._warned_of_writes = self._warned_of_range = self._warned_of_lag = False
        self._all.add(self)

    def mute(self) -> None:
        """Stop warning of writes."""
        self._warned_of_writes = True

    def begin(self) -> None:
        """Remember the weights, just after masters were written to the model."""
        models = self._masters.model_params()
        if not self._warned_of_writes:
            self._sample = models[:: -(-len(models) // _SAMPLES) or 1]
            self._versions = _C.versions(self._sample)
        if self._steps & (self._steps - 1) == 0 and not readback.is_capturing():
            self._norms = self._norms_now()
            if not all(map(math.isfinite, self._norms.values())):
                self.check_range()

    def before_step(self) -> None:
        """Warn if weights were written since `begin` and their masters were not."""
        norms, self._norms = self._norms, {}
        self._steps += 1
        if self._warned_of_writes or readback.is_capturing():
            return
        written, versions = set(), _C.versions(self._sample)
        if versions != self._versions:
            each = zip(self._sample, versions, self._versions, strict=True)
            written = {param for param, now, before in each if now != before}
        if norms:
            written |= {p for p, norm in self._norms_now().items() if norms.get(p, norm) != norm}
        if not written:
            return
        # Weights that were replaced and put back agree; so do weights written with their masters.
        lost = [
            master
            for master, model in self._masters.model_of.items()
            if model in written and bool(differ(master, model).any())
        ]
        if lost:
            self._warn_of_writes(lost)

    def note_masters(self) -> None:
        """Remember the masters, just after they were written to the model."""
        masters = self._masters.master_params()
        step = -(-len(masters) // _SAMPLES) or 1
        self._master_versions = {master: master._version for master in masters[::step]}

    def check_masters(self) -> None:
        """Warn once if masters were written since `note_masters` and the model was not."""
        if self._warned_of_lag:
            return
        for master, version in self._master_versions.items():
            model = self._masters.model_of.get(master)
            if master._version == version or model is None or not differ(master, model).any():
                continue
            self._warned_of_lag = True
            warn(
                f"{self._caller}: the float32 master of the model's {self._name_of(master)} has "
                "changed outside of the optimizer's step(), and the model has not, so the loss is "
                "that of other weights; the optimizer that scale_loss is given must take the steps",
                "weights-changed-outside-of-the-step",
            )
            return

    def _warn_of_writes(self, masters: list[Parameter]) -> None:
        self.mute()
        more = f" and {counted(len(masters) - 1, 'more parameter')}" if len(masters) > 1 else ""
        models = {id(self._masters.model_of[master]) for master in masters}
        others = [
            each for each in self._all if each is not self and each._masters.masters_of(models)
        ]
        cause = f"; another {self._caller} has masters of the same parameters" if others else ""
        warn(
            f"{self._caller}: the model's {self._name_of(masters[0])}{more} changed since the last "
            f"step, but not the float32 master, which this step writes over it{cause}. "
            f"{self._advice}",
            "weights-changed-outside-of-the-step",
        )

    def _norms_now(self) -> dict[Parameter, float]:
        models = self._masters.model_params()
        if not all(param.is_cpu for param in models):
            return {}  # The host would wait.
        return dict(zip(models, found_inf.norms(models), strict=True))

    @torch.no_grad()
    def check_range(self) -> None:
        """Warn of the first master that is finite and rounds to inf in float16."""
        flats = [] if self._warned_of_range else self._masters.flats()
        if not any(_peak(flat) >= _FLOAT16_OVERFLOW for flat in flats):
            return
        for master, model in self._masters.model_of.items():
            peak = _peak(master)
            if model.dtype == torch.float16 and peak >= _FLOAT16_OVERFLOW:
                self._warned_of_range = True
                warn(
                    f"{self._caller}: {self._name_of(master)} has come to {peak:.6g}, beyond 65504,"
                    " the largest float16: the float32 master holds it, the model's copy is inf. "
                    "Train this parameter in float32 or bfloat16, or bound it by weight decay",
                    "a-weight-beyond-65504",
                )
                return


def _peak(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; 0 if there are inf or NaN, or no elements."""
    if tensor.numel() == 0:
        return 0.0
    ends = torch.stack(tensor.detach().aminmax()).abs()
    return float(ends.max()) if bool(ends.isfinite().all()) else 0.0
