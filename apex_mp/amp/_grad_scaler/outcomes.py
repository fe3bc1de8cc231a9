"""The outcomes of an optimizer's steps under a GradScaler: skipped or not, and why."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import readback, tensors
from apex_mp.core.log import warn
from apex_mp.grads.found_inf import one_flag
from apex_mp.grads.in_host_memory import grad_here
from apex_mp.grads.measured import Measured
from apex_mp.grads.nonfinite import NonFinite, locate_nonfinite
from apex_mp.masters.param_names import ParamNames
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers._hints import warn_of_eps, warn_of_lost_updates
from apex_mp.scale import device_scale
from apex_mp.step import step_log
from apex_mp.step.record import SKIPS_BEFORE_WARNING, StepRecord
from apex_mp.step.scaled_step import HostOutcome, Outcome, StepResult

_SKIPS_TO_LOWEST = 8  # fewer may be a scale that begins near its lowest
_TINY_SCALE = 2.0**-40


class ScaledSteps:
    """The outcomes of one optimizer's steps.

    Args:
        optimizer: The optimizer; a weak reference is kept.
        model: Returns the module whose names are used first, or None.
        scaler: The GradScaler; a weak reference is kept.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Callable[[], torch.nn.Module | None] | None,
        scaler: Any,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._model = model
        self._scaler = weakref.ref(scaler)
        self._record = StepRecord(optimizer, f"GradScaler: {type(optimizer).__name__}")
        self._has_seen_zeros = False
        name = type(optimizer).__name__
        keeper = name if isinstance(optimizer, FusedOptimizer) else "FusedAdam"
        advice = (
            f"{keeper}(..., master_weights=True) keeps masters; "
            "apex_mp.optimizers.MasterWeights(optimizer) gives them to any other optimizer"
        )
        warn_of_lost_updates(optimizer, f"GradScaler: {name}", self._named_params(), advice)
        warn_of_eps("GradScaler", optimizer)

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped; the host waits until it knows."""
        return self._record.was_skipped

    @property
    def report(self) -> list[NonFinite]:
        """Which gradients held inf or NaN in the last skipped step; the host waits."""
        readback.wait()
        return [*self._record.report]

    # The end of a step.

    def submit(
        self,
        result: StepResult,
        measured: Measured | None = None,
    ) -> None:
        """Record a step; the host does not wait for a GPU."""
        versions = _C.GradVersions()
        if not result.outcome.is_known:
            versions.record(self._params())
        finish = functools.partial(self._finish, result, measured, versions)
        self._record.submit(result, finish)

    def submit_flags(self, flags: Mapping[torch.device, Tensor], measured: Measured | None) -> None:
        """Record a fused step that was given what passes before it have found."""
        remote = [device for device in flags if device.type in device_scale.DEVICE_TYPES]
        if not remote:
            self.submit(StepResult(outcome(flags, measured)), measured)
            return
        scalar_device = remote[0]
        found_inf = one_flag(flags, scalar_device)
        numbers, rows = found_inf.double().view(1), list[int]()
        if measured is not None and measured.found.sum_sq:
            numbers = torch.cat([numbers, measured.found.sums_on(scalar_device)])
            rows = measured.rows
        step = dataclasses.replace(
            StepResult.of_flag(found_inf),
            sent=numbers,
            read=functools.partial(_read_numbers, rows),
        )
        self.submit(step, measured)

    def _finish(
        self,
        result: StepResult,
        measured: Measured | None,
        versions: _C.GradVersions,
        outcome: Outcome,
    ) -> None:
        """Record a step's outcome."""
        scaler, optimizer = self._scaler(), self._optimizer()
        skipped = outcome.found_inf
        report = self._report_of(result, measured, versions, outcome) if skipped else []
        has_grads = bool(outcome.norms) and (measured is not None or bool(result.grad_dtypes))
        norm = math.hypot(*outcome.norms) if has_grads else None
        unscaled = measured is None or measured.unscaled

        def note() -> step_log.StepNote:
            return step_log.StepNote(
                skipped,
                lowest=None if scaler is None else scaler._lowest,
                grad_norm=norm if unscaled else None,
                scaled_norm=None if unscaled else norm,
                overflow=report,
                optimizer=optimizer,
            )

        self._record.end(
            skipped,
            report,
            scale=self._scale,
            attempted=self._scale,
            owners=[scaler, optimizer],
            note=note,
        )
        if skipped and scaler is not None:
            self._warn_of_lowest(scaler, report)
        # Squares of gradients at a tiny scale are 0 though they are not.
        may_see = not self._has_seen_zeros and optimizer is not None
        if norm == 0.0 and may_see and self._scale() > _TINY_SCALE:
            self._has_seen_zeros = True
            warn(
                f"GradScaler: all gradients of {type(optimizer).__name__} are 0 in this step. "
                "torch's clip_grad_norm_ makes them 0 if the norm of scaled float16 gradients is "
                "inf: call scaler.clip_grad_norm_(optimizer, max_norm) instead, or "
                "scaler.unscale_(optimizer) before it. Or they are too small for their dtype at "
                f"the scale {self._scale():g}, or the loss does not depend on the parameters, as "
                "in a step of reinforcement learning in which all rewards are equal",
                "clipping-scaled-gradients",
            )

    def _report_of(
        self,
        result: StepResult,
        measured: Measured | None,
        versions: _C.GradVersions,
        outcome: Outcome,
    ) -> list[NonFinite]:
        """Return which gradients held inf or NaN; without counts if they are gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        if result.outcome.is_known:
            return self._locate()
        params = self._params()
        names = ParamNames(None, None if self._model is None else self._model())
        if measured is None:
            has_all = sum(param.grad is None for param in params) == len(result.without_grad)
            if has_all and not versions.changed(params):
                return self._locate()
            return names.rows(outcome.nonfinite_rows, result.without_grad, optimizer.param_groups)
        stepped = measured.params()
        has_all = all(param.grad is not None for param in stepped)
        if has_all and not versions.changed(params):
            return self._locate()
        each = zip(stepped, outcome.norms, strict=True)
        found = {id(param) for param, norm in each if not math.isfinite(norm)}
        return [
            NonFinite(name, tuple(param.shape))
            for name, param in self._named_params()
            if id(param) in found
        ]

    def _warn_of_lowest(self, scaler: Any, report: Sequence[NonFinite]) -> None:
        """Warn once that skips in a row have lowered the scale as far as it goes."""
        skips = self._record.skips_in_a_row
        is_time = _SKIPS_TO_LOWEST <= skips < SKIPS_BEFORE_WARNING
        if not is_time or self._record.has_named_cause:
            return
        if scaler.get_scale() * scaler.get_backoff_factor() > scaler._lowest:
            return
        self._record.has_named_cause = True
        worst = f" The worst: {report[0]}." if report else ""
        warn(
            f"{self._record.skips()}, and the loss scale has come down to its lowest, "
            f"{scaler._lowest:g}, where small gradients are lost in float16. Gradients held inf or "
            f"NaN at every scale.{worst} No scale cures a NaN: look for its cause, in the data or "
            "by apex_mp.monitor.find_nonfinite. Afterwards scaler.update(2.0**16) sets the scale "
            f"at once; else it doubles every {scaler.get_growth_interval()} steps",
            "the-loss-scale-sinks",
        )

    def _scale(self) -> float:
        scaler = self._scaler()
        return math.nan if scaler is None else scaler.get_scale()

    # Names.

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else tensors.params_of(optimizer)

    def _named_params(self) -> Iterator[tuple[str, Tensor]]:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        model = None if self._model is None else self._model()
        yield from ParamNames(None, model).params(optimizer.param_groups)

    def _locate(self) -> list[NonFinite]:
        """Return which present gradients hold inf or NaN."""
        return locate_nonfinite(
            (name, _numbers_of(grad))
            for name, param in self._named_params()
            if (grad := grad_here(param)) is not None
        )


def outcome(flags: Mapping[torch.device, Tensor], measured: Measured | None) -> HostOutcome:
    """Return what was found; the host waits, once for each device.

    Returns:
        Whether any flag was not 0; and, if measured, the norm on each device, NaN if gradients
        there held inf or NaN.
    """
    sums = {} if measured is None else measured.found.sum_sq
    skipped, norms = False, []
    for device, found in flags.items():
        if device in sums:
            # One number, because the host waits for each.
            sum_sq = torch.where(found != 0.0, math.nan, sums[device].sum()).item()
            norms.append(math.sqrt(sum_sq))
            skipped |= math.isnan(sum_sq)
        else:
            skipped |= found.item() != 0.0
    return HostOutcome(skipped, norms)


def _read_numbers(rows: list[int], numbers: Tensor) -> HostOutcome:
    """Return an outcome with a norm for each of some parameters, from a flag and all sums."""
    found_inf, *sums = numbers.tolist()
    return HostOutcome(found_inf != 0.0, [math.sqrt(sums[row]) for row in rows])


def _numbers_of(grad: Tensor) -> Tensor:
    """Return a gradient as a tensor that can be searched for inf and NaN."""
    if grad.is_sparse:
        return grad._values()
    return tensors.local_part(grad)
