"""The record of an optimizer's steps, whether the host knows their outcomes at once or later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import readback
from apex_mp.core.log import warn
from apex_mp.grads.nonfinite import NonFinite
from apex_mp.step import step_log
from apex_mp.step.scaled_step import Outcome, StepResult

SKIPS_BEFORE_WARNING = 50


class StepRecord:
    """What became of one optimizer's steps, for its user, schedulers and listeners.

    A step ends in two calls: `submit`, which passes on its outcome at once or when it has arrived
    from a device, and `end`.

    Args:
        optimizer: The optimizer that schedulers watch; a weak reference is kept.
        who: The beginning of the warning of endless skips.

    Attributes:
        report: Which gradients held inf or NaN in the last skipped step, as far as the host knows.
        skips_in_a_row: How many of the last steps were skipped, as far as the host knows.
        has_named_cause: Whether a warning has said that the scale is not the cause of skips.
        steps: How many steps there were, skipped ones included.
        captured: If a CUDA graph took the last step, a tensor on the device: not 0 if the step was
            skipped, which the host does not know. Else None.
    """

    def __init__(self, optimizer: Any, who: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._who = who
        self.report: Sequence[NonFinite] = ()
        self.skips_in_a_row = self.steps = 0
        self.has_named_cause = False
        self.captured: Tensor | None = None

    @property
    def was_skipped(self) -> bool:
        """Return whether the last step was skipped; the host waits until it knows."""
        readback.wait()
        return self.skips_in_a_row > 0 if self.captured is None else bool(self.captured)

    def submit(self, result: StepResult, finish: Callable[[Outcome], None]) -> None:
        """Call `finish` with the outcome of a step: now, or later if the host does not know it yet.

        Steps finish in the order in which they were taken. A captured step is only noted: a graph
        takes it whenever it likes.
        """
        self.captured = None
        if result.outcome.is_known:
            readback.wait()  # The steps before this one come first.
            finish(result.outcome)
            return
        if readback.is_capturing():
            self.captured = result.found_inf
            return
        sent, read = result.sent, result.read
        assert sent is not None  # Else its outcome is known.
        assert read is not None

        readback.submit_tensor(sent, lambda values: finish(read(values)))

    def skips(self) -> str:
        """Return how many steps were skipped in a row, and since when, to begin a message."""
        first = self.steps - self.skips_in_a_row + 1
        count = self.skips_in_a_row
        return f"{self._who} has skipped {count} steps in a row, from its step {first} on"

    def end(
        self,
        skipped: bool,
        report: Sequence[NonFinite],
        *,
        scale: Callable[[], float],
        attempted: Callable[[], float],
        owners: Sequence[Any],
        note: Callable[[], step_log.StepNote],
    ) -> None:
        """Record the outcome of a step; steps end in the order in which they were taken.

        Listeners may raise, so call this when all else is done. All of `owners` are notified, then
        the first error is raised.
        """
        self.steps += 1
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if skipped:
            self.report = report
            _mark_step_called(self._optimizer())
            if not self.has_named_cause and _are_nan(report) and attempted() <= 1.0:
                self.has_named_cause = True
                warn(
                    f"{self._who}: gradients hold NaN, and no inf, at a loss scale of "
                    f"{attempted():g}, so the scale is not the cause, and no scale cures it. The "
                    f"worst: {report[0]}. Look for a NaN in the data, a division by 0 or the root "
                    "of one, or find the module by apex_mp.monitor.find_nonfinite",
                    "the-loss-scale-sinks",
                )
        if self.skips_in_a_row == SKIPS_BEFORE_WARNING:
            worst = f" The worst: {report[0]}." if report else ""
            warn(
                f"{self.skips()}; the loss scale is now {scale()}. Gradients hold inf or NaN at "
                f"every scale tried.{worst}",
                "every-step-is-skipped",
            )
        notified = step_log.heard(*owners)
        if notified:
            step_log.notify(notified, note())


def _are_nan(report: Sequence[NonFinite]) -> bool:
    """Return whether gradients hold NaN and no inf, as far as that is known."""
    return bool(report) and all(each.nan and each.inf == 0 for each in report)


def _mark_step_called(optimizer: Any) -> None:
    """Keep schedulers from warning that `step` was never called, after a step that was skipped.

    A scheduler may watch the optimizer, or one inside it, which is an attribute of it.
    """
    for each in (optimizer, *getattr(optimizer, "__dict__", {}).values()):
        if isinstance(each, torch.optim.Optimizer) and hasattr(each.step, "_wrapped_by_lr_sched"):
            each._opt_called = True  # type: ignore[attr-defined]
