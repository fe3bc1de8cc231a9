"""The outcomes of an FP16_Optimizer's steps: overflow, loss scale, messages, listeners."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from apex_mp.core.grads import checks
from apex_mp.core.grads.found_inf import FoundInf
from apex_mp.core.log import see
from apex_mp.core.masters.master_grads import Stage
from apex_mp.core.step import readback, step_log
from apex_mp.core.step.scaled_step import HostOutcome, Outcome, StepResult
from apex_mp.core.step.skips import Overflow
from apex_mp.core.tensors import Lists
from apex_mp.fp16_utils._old_names import OldNames
from apex_mp.fp16_utils._parts import LOG, eager
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler
from apex_mp.loss_scale import DynamicLossScale


class Outcomes(OldNames):
    """The layer that records whether gradients overflowed, and reports it."""

    @property
    @eager
    def overflow(self) -> bool:
        """Whether the present gradients hold inf or NaN; after `step`, whether it was skipped.

        On a GPU the host waits for it.
        """
        if self._overflow is None:
            readback.wait()
        is_stepped = self._overflow is None and self._grads.stage is Stage.STEPPED
        if is_stepped and self._record.captured is not None:
            return self._record.was_skipped  # Until the next replay.
        if self._overflow is None:
            lists, scale = self._grads.collect(self.param_groups)
            found, norms = check_groups(lists)
            self._overflow = bool(found)
            self._group_norms = [norm / float(scale) for norm in norms]
        return self._overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._forget_overflow()
        self._overflow = bool(value)

    @property
    def overflow_report(self) -> list[checks.NonFinite]:
        """For the last skipped step, which gradients held how many inf and NaN, the worst first.

        On a GPU the host waits for it. If the gradients were cleared before it is read, there are
        no counts, and only the first eight parameters are named; none if parameters lie on several
        devices.
        """
        readback.wait()
        return [*self._record.report]

    def _forget_overflow(self) -> None:
        self._overflow = None
        self._awaited = None

    def _end_step(self, *, skipped: bool | None) -> None:
        self._overflow = skipped
        found = self._locate() if skipped else []  # While masters still have gradients.
        self._grads.end_step()
        if skipped is None:
            assert self._awaited is not None  # The step has left it there.
            if readback.is_capturing():
                self._device_scale.note_captured()
            # _on_arrival may be called from now on.
            self._record.submit(self._awaited, self._arrival(self._awaited))
            return
        self._awaited = None
        norms, self._group_norms = self._group_norms, []
        self._record.submit(
            StepResult(HostOutcome(skipped, norms)),
            lambda _: self._take_note(
                skipped, self._loss_scaler.update_scale, lambda: found, norms
            ),
        )

    def _arrival(self, result: StepResult) -> Callable[[Outcome], None]:
        """Return a function that handles a step's outcome, without keeping this object alive."""
        weak, verbose = weakref.ref(self), self.verbose

        def arrive(outcome: Outcome) -> None:
            optimizer = weak()
            if optimizer is not None:
                optimizer._on_arrival(outcome, result)
            elif verbose and outcome.found_inf:
                LOG.warning(
                    "FP16_Optimizer: a gradient overflowed and its step was skipped, which the "
                    "device reported after the optimizer was deleted"
                    + see("results-that-were-lost")
                )

        return arrive

    def _on_arrival(self, outcome: Outcome, result: StepResult) -> None:
        """Handle the outcome of a step that completed asynchronously."""

        def locate() -> list[checks.NonFinite]:
            if is_last and self._grads.stage is Stage.STEPPED and not self._grads.has_new_grads():
                return self._locate()
            return self._names.rows(outcome.nonfinite_rows, result.without_grad, self.param_groups)

        is_last = result is self._awaited
        if is_last:
            self._overflow = outcome.found_inf
            self._awaited = None
        self._take_note(
            outcome.found_inf,
            lambda skipped: self._device_scale.update(self._loss_scaler, skipped=skipped),
            locate,
            outcome.norms,
        )

    def _take_note(
        self,
        skipped: bool,
        update_scale: Callable[[bool], None],
        locate: Callable[[], list[checks.NonFinite]],
        norms: list[float],
    ) -> None:
        """Update scaler and counts, and log what was skipped."""
        scaler = self._loss_scaler
        scale = scaler.cur_scale
        iteration = scaler.cur_iter if isinstance(scaler, DynamicLossScaler) else self._iteration
        update_scale(skipped)
        self._iteration += 1
        report = locate() if skipped else []
        if skipped:
            self._weights.check_range()
            if self.verbose:
                overflow = Overflow(report, scale, scaler.cur_scale)
                overflow.log(LOG, self._skip_message(iteration, scale))
        self._record.end(
            skipped,
            report,
            scale=lambda: self._scaler_now().cur_scale,
            attempted=lambda: scale,
            owners=[self],
            note=lambda: self._note(skipped, scale, norms),
        )

    def _note(self, skipped: bool, scale: float, norms: list[float]) -> step_log.StepNote:
        value = self._loss_scaler.loss_scale_value
        is_clipped = "grad_norms" in self._legacy_arguments
        rule = getattr(self.optimizer, "_rule", None)
        always_global = rule is not None and rule.clips_by_global_norm  # as FusedLAMB
        norm, clip = step_log.norm_and_clip(
            norms,
            self.param_groups if is_clipped else [{}] * len(norms),
            by_global_norm=always_global or self.clip == "global",
        )
        return step_log.StepNote(
            skipped,
            scale,
            lowest=value.min_scale if isinstance(value, DynamicLossScale) else None,
            grad_norm=norm,
            clip=clip,
            overflow=self._record.report if skipped else (),
        )

    def _locate(self) -> list[checks.NonFinite]:
        return checks.locate_nonfinite(self._names.grads(self.param_groups))

    def _skip_message(self, iteration: int, scale: float) -> str:
        message = f"OVERFLOW! Skipping step. Attempted loss scale: {scale}"
        if not self.dynamic_loss_scale:
            return message
        return f"{message}, reducing to {self._scaler_now().cur_scale}"


def check_groups(lists: Lists) -> tuple[FoundInf, list[float]]:
    """Check the gradients of each group; return what was found, and the l2 norm of each."""
    found = FoundInf()
    found.check_lists(lists)
    return found, found.group_norms(lists)
