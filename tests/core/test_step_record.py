"""StepRecord: what became of one optimizer's steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from apex_mp.grads.nonfinite import NonFinite
from apex_mp.step import step_log
from apex_mp.step.record import StepRecord

pytestmark = pytest.mark.cpu_only

REPORT = [NonFinite("w", (2,), 1, 0), NonFinite("b", (1,), 0, 1)]


class Listening:
    """A listener that keeps its notes, and may raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.notes: list[step_log.StepNote] = []
        self._error = error

    def after_step(self, note: step_log.StepNote) -> None:
        self.notes.append(note)
        if self._error is not None:
            raise self._error


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def end(
    record: StepRecord, skipped: bool, *owners: Any, report: Any = REPORT, attempted: float = 1.0
) -> None:
    record.end(
        skipped,
        report if skipped else (),
        scale=lambda: 0.5,
        attempted=lambda: attempted,
        owners=owners,
        note=lambda: step_log.StepNote(skipped),
    )


def test_the_fiftieth_skip_in_a_row_warns_with_the_worst_and_the_scale(
    optimizer: torch.optim.Optimizer,
) -> None:
    record = StepRecord(optimizer, "it")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for skipped in [True] * 49 + [False] + [True] * 60:
            end(record, skipped)
    (message,) = [str(each.message) for each in caught]
    assert message == (
        "it has skipped 50 steps in a row, from its step 51 on; the loss scale is now 0.5. "
        "Gradients hold inf or NaN at "
        "every scale tried. The worst: w [2]: 1 inf, 0 NaN. "
        "[python -m apex_mp explain every-step-is-skipped]"
    )


def test_nan_at_a_scale_of_1_is_said_at_once_not_to_come_from_the_scale(
    optimizer: torch.optim.Optimizer,
) -> None:
    record = StepRecord(optimizer, "it")
    nan, inf, unknown = (NonFinite("w", (2,), *counts) for counts in ((0, 2), (1, 1), ()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end(record, True, report=[nan], attempted=2.0)
        end(record, True, report=[nan, inf])
        end(record, True, report=[unknown])
        end(record, True, report=[])
        assert not caught
        for _ in range(2):
            end(record, True, report=[nan])
    (message,) = [str(each.message) for each in caught]
    assert message == (
        "it: gradients hold NaN, and no inf, at a loss scale of 1, so the scale is not the cause, "
        "and no scale cures it. The worst: w [2]: 0 inf, 2 NaN. Look for a NaN in the data, a "
        "division by 0 or the root of one, or find the module by apex_mp.monitor.find_nonfinite "
        "[python -m apex_mp explain the-loss-scale-sinks]"
    )


def test_a_skipped_step_counts_for_schedulers_of_the_optimizer_and_of_one_inside_it(
    optimizer: torch.optim.Optimizer, recwarn: pytest.WarningsRecorder
) -> None:
    outer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    outer.inside = optimizer  # type: ignore[attr-defined]
    record = StepRecord(outer, "it")
    for each in (outer, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(each, 1)
        end(record, True)
        scheduler.step()
    assert not recwarn


def test_all_listeners_are_notified_once_the_step_is_recorded_though_one_raises(
    optimizer: torch.optim.Optimizer,
) -> None:
    record, other = StepRecord(optimizer, "it"), type("Owner", (), {})()
    first, second = Listening(ValueError("first")), Listening(ValueError("second"))
    step_log.listen(optimizer, first)  # type: ignore[arg-type]
    step_log.listen(other, second)  # type: ignore[arg-type]
    step_log.listen(other, first)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="first"):
        end(record, True, optimizer, None, other)
    assert record.was_skipped
    assert (
        [note.skipped for note in first.notes] == [note.skipped for note in second.notes] == [True]
    )
    step_log.unlisten(first)  # type: ignore[arg-type]
    step_log.unlisten(second)  # type: ignore[arg-type]
