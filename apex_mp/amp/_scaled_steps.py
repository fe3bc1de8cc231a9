"""The outcomes of an optimizer's steps under a GradScaler: skipped or not, and why."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.amp._eps import warn_of_eps
from apex_mp.amp._folded_clip import params_of
from apex_mp.amp._scaled_grads import Measured
from apex_mp.core import device_scale, readback, step_log, tensors
from apex_mp.core.grads import NonFinite, locate_nonfinite
from apex_mp.core.log import warn
from apex_mp.core.skips import ParamNames
from apex_mp.core.step import Outcome, StepResult
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers._lost_updates import LostUpdates

_SKIPS_TO_LOWEST = 8  # fewer may be a scale that begins near its lowest
_TINY_SCALE = 2.0**-40
_Norm: TypeAlias = "tuple[float | None, bool]"


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
        self._log = step_log.StepLog(optimizer, f"GradScaler: {type(optimizer).__name__}")
        self._found_inf: bool | Tensor = False  # of the last step
        self._has_seen_zeros = self._has_warned_of_lowest = False
        name = type(optimizer).__name__
        keeper = name if isinstance(optimizer, FusedOptimizer) else "FusedAdam"
        advice = (
            f"{keeper}(..., master_weights=True) keeps masters; for other optimizers make them "
            "with apex_mp.fp16_utils.prep_param_lists or use FP16_Optimizer"
        )
        self._lost_updates = LostUpdates(
            optimizer, f"GradScaler: {name}", advice, self._named_params
        )
        warn_of_eps("GradScaler", optimizer)

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped; the host waits until it knows."""
        return self._log.was_skipped

    @property
    def report(self) -> list[NonFinite]:
        """Which gradients held inf or NaN in the last skipped step; the host waits."""
        readback.wait()
        return [*self._log.report]

    # The end of a step.

    def end_step(self, skipped: bool, sum_sq: Sequence[float], measured: Measured | None) -> None:
        """Record a step that the host has waited for.

        Args:
            skipped: Whether it was skipped.
            sum_sq: Sums of squares that `outcome` has read; empty if nothing was measured.
            measured: What is known of each gradient.
        """
        readback.wait()  # The steps before this one come first.
        self._found_inf, self._log.captured = skipped, None
        self._take_note(skipped, _norm(sum_sq, measured), self._locate)

    def end_scaled_step(self, result: StepResult) -> None:
        """Record a step that has checked gradients itself; the host does not wait for a GPU."""
        outcome, found_inf = result.outcome, result.found_inf
        if found_inf is None:
            readback.wait()
            self._found_inf, self._log.captured = outcome.found_inf, None
            self._take_note(outcome.found_inf, (_norm_of(result, outcome), True), self._locate)
            return
        self._found_inf, self._log.captured = found_inf, None
        if readback.is_capturing():
            self._log.captured = found_inf
            return
        assert result.sent is not None  # As `found_inf`.
        finish = functools.partial(self._on_result, result, self._grad_versions())
        readback.submit_tensor(result.sent, finish)

    def _grad_versions(self) -> _C.GradVersions:
        versions = _C.GradVersions()
        versions.record(self._params())
        return versions

    def _on_result(self, result: StepResult, versions: _C.GradVersions, arrived: Tensor) -> None:
        """Record a step that completed asynchronously.

        Args:
            result: The result of the step.
            versions: The gradients of the step.
            arrived: A copy of `result.sent` on the CPU.
        """
        assert result.read is not None  # As `sent`.
        outcome, optimizer = result.read(arrived), self._optimizer()
        if outcome.found_inf and result.undo_state is not None:
            result.undo_state()

        def locate() -> list[NonFinite]:
            if optimizer is None or not versions.changed(self._params()):
                return self._locate()
            return self._param_names().rows(
                outcome.nonfinite_rows, result.without_grad, optimizer.param_groups
            )

        self._take_note(outcome.found_inf, (_norm_of(result, outcome), True), locate)

    def end_fused_step(
        self, found_inf: Mapping[torch.device, Tensor], measured: Measured | None
    ) -> None:
        """Record a step that was given `found_inf`; the host does not wait for a GPU.

        Args:
            found_inf: By device, not 0 if gradients there held inf or NaN.
            measured: What is known of each gradient.
        """
        remote = [device for device in found_inf if device.type in device_scale.DEVICE_TYPES]
        if not remote:
            self.end_step(*outcome(found_inf, measured), measured)
            return
        scalar_device = remote[0]
        # A copy: GradScaler.update() writes to one of the flags.
        flags = [tensors.copy_async(flag, scalar_device) for flag in found_inf.values()]
        found = torch.stack(flags).sum()
        self._found_inf, self._log.captured = found, None
        if readback.is_capturing():
            self._log.captured = found
            return
        sums = [] if measured is None else [*measured.found.sum_sq.values()]
        numbers = torch.cat(
            [found.double().view(1), *(tensors.copy_async(s, scalar_device) for s in sums)]
        )
        finish = functools.partial(self._on_readback, measured, self._grad_versions())
        readback.submit_tensor(numbers, finish)

    def _on_readback(
        self, measured: Measured | None, versions: _C.GradVersions, numbers: Tensor
    ) -> None:
        """Record a step that completed asynchronously.

        Args:
            measured: What was measured of its gradients.
            versions: These gradients.
            numbers: Whether it was skipped, and the sum of squares of each gradient.
        """
        found, *sums = numbers.tolist()
        params = [] if measured is None else measured.params()

        def locate() -> list[NonFinite]:
            have_grads = all(param.grad is not None for param in params)
            if have_grads and not versions.changed(self._params()):
                return self._locate()
            each = zip(params, sums, strict=True)
            rows = {id(param) for param, sum_sq in each if not math.isfinite(sum_sq)}
            return [
                NonFinite(name, tuple(param.shape))
                for name, param in self._named_params()
                if id(param) in rows
            ]

        self._take_note(found != 0.0, _norm(sums, measured), locate)

    def _take_note(
        self, skipped: bool, measured: _Norm, locate: Callable[[], list[NonFinite]]
    ) -> None:
        """Record a step's outcome.

        Args:
            skipped: Whether it was skipped.
            measured: The norm of all gradients, or None; and whether it is that of unscaled ones.
            locate: Returns which gradients held inf or NaN.
        """
        scaler, optimizer = self._scaler(), self._optimizer()
        report = locate() if skipped else []
        norm, unscaled = measured

        def note() -> step_log.StepNote:
            return step_log.StepNote(
                skipped,
                lowest=None if scaler is None else scaler._lowest,
                grad_norm=norm if unscaled else None,
                scaled_norm=None if unscaled else norm,
                overflow=report,
                optimizer=optimizer,
            )

        self._log.end(skipped, report, scale=self._scale, owners=[scaler, optimizer], note=note)
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

    def _warn_of_lowest(self, scaler: Any, report: Sequence[NonFinite]) -> None:
        """Warn once that skips in a row have lowered the scale as far as it goes."""
        skips = self._log.skips_in_a_row
        is_time = _SKIPS_TO_LOWEST <= skips < step_log.SKIPS_BEFORE_WARNING
        if not is_time or self._has_warned_of_lowest:
            return
        if scaler.get_scale() * scaler.get_backoff_factor() > scaler._lowest:
            return
        self._has_warned_of_lowest = True
        worst = f" The worst: {report[0]}." if report else ""
        warn(
            f"{self._log.skips()}, and the loss scale has come down to its lowest, "
            f"{scaler._lowest:g}, where small gradients are lost in float16. Gradients held inf or "
            f"NaN at every scale.{worst} No scale cures a NaN: look for its cause, in the data or "
            "by apex_mp.monitor.find_nonfinite. Afterwards scaler.update(2.0**16) sets the scale "
            f"at once; else it doubles every {scaler.get_growth_interval()} steps",
            "the-loss-scale-sinks",
        )

    def _scale(self) -> float:
        scaler = self._scaler()
        return math.nan if scaler is None else scaler.get_scale()

    @contextlib.contextmanager
    def watching_updates(self) -> Iterator[None]:
        """A context in which a step is taken; warn once that parameters have no masters."""
        counter = self._lost_updates.before_step()
        yield
        self._lost_updates.after_step(counter, self._found_inf)

    # Names.

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else params_of(optimizer)

    def _named_params(self) -> Iterator[tuple[str, Tensor]]:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        yield from self._param_names().params(optimizer.param_groups)

    def _param_names(self) -> ParamNames:
        return ParamNames(None, None if self._model is None else self._model())

    def _locate(self) -> list[NonFinite]:
        """Return which present gradients hold inf or NaN."""
        return locate_nonfinite(
            (name, _numbers_of(param.grad))
            for name, param in self._named_params()
            if param.grad is not None
        )


def _norm_of(result: StepResult, outcome: Outcome) -> float | None:
    """Return the norm of all unscaled gradients; None if there were none."""
    return math.hypot(*outcome.norms) if result.grad_dtypes else None


def _norm(sum_sq: Sequence[float], measured: Measured | None) -> _Norm:
    unscaled = measured is not None and measured.unscaled
    return (math.sqrt(sum(sum_sq)) if sum_sq else None), unscaled


def outcome(
    found_inf: Mapping[torch.device, Tensor], measured: Measured | None
) -> tuple[bool, list[float]]:
    """Return what was found; the host waits, once for each device.

    Args:
        found_inf: By device, not 0 if gradients there held inf or NaN.
        measured: What is known of each gradient.

    Returns:
        Whether any flag was not 0; and, if measured, the sum of squares on each device, NaN if
        gradients there held inf or NaN.
    """
    sums = {} if measured is None else measured.found.sum_sq
    skipped, read = False, []
    for device, found in found_inf.items():
        if device in sums:
            # One number, because the host waits for each.
            read.append(torch.where(found != 0.0, math.nan, sums[device].sum()).item())
            skipped |= math.isnan(read[-1])
        else:
            skipped |= found.item() != 0.0
    return skipped, read


def _numbers_of(grad: Tensor) -> Tensor:
    """Return a gradient as a tensor that can be searched for inf and NaN."""
    if grad.is_sparse:
        return grad._values()
    return tensors.local_part(grad)
