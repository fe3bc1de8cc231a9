"""What follows from the outcome of an FP16_Optimizer's step: scale, messages, listeners."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from apex_mp.core.grads import checks
from apex_mp.core.grads.found_inf import FoundInf
from apex_mp.core.log import logger, see
from apex_mp.core.masters.master_grads import Stage
from apex_mp.core.step import readback, step_log
from apex_mp.core.step.overflow import Overflow
from apex_mp.core.step.scaled_step import HostOutcome, Outcome, StepResult
from apex_mp.core.tensors import Lists
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler
from apex_mp.loss_scale import DynamicLossScale

LOG = logger("apex_mp.fp16_utils")


def end_step(owner: Any, *, skipped: bool | None) -> None:
    """Record the outcome of a step of an FP16_Optimizer; None: it is not known yet."""
    owner._overflow = skipped
    found = owner._locate() if skipped else []  # While masters still have gradients.
    owner._grads.end_step()
    if skipped is None:
        assert owner._awaited is not None  # The step has left it there.
        if readback.is_capturing():
            owner._device_scale.note_captured()
        # _on_arrival may be called from now on.
        owner._record.submit(owner._awaited, _arrival(owner, owner._awaited))
        return
    owner._awaited = None
    norms, owner._group_norms = owner._group_norms, []
    owner._record.submit(
        StepResult(HostOutcome(skipped, norms)),
        lambda _: _take_note(owner, skipped, owner._loss_scaler.update_scale, lambda: found, norms),
    )


def _arrival(owner: Any, result: StepResult) -> Callable[[Outcome], None]:
    """Return a function that handles a step's outcome, without keeping the optimizer alive."""
    weak, verbose = weakref.ref(owner), owner.verbose

    def arrive(outcome: Outcome) -> None:
        alive = weak()
        if alive is not None:
            _on_arrival(alive, outcome, result)
        elif verbose and outcome.found_inf:
            LOG.warning(
                "FP16_Optimizer: a gradient overflowed and its step was skipped, which the "
                "device reported after the optimizer was deleted" + see("results-that-were-lost")
            )

    return arrive


def _on_arrival(owner: Any, outcome: Outcome, result: StepResult) -> None:
    """Handle the outcome of a step that completed asynchronously."""

    def locate() -> list[checks.NonFinite]:
        grads, names = owner._grads, owner._names
        if is_last and grads.stage is Stage.STEPPED and not grads.has_new_grads():
            return checks.locate_nonfinite(names.grads(owner.optimizer.param_groups))
        rows, without_grad = outcome.nonfinite_rows, result.without_grad
        found: list[checks.NonFinite] = names.rows(rows, without_grad, owner.optimizer.param_groups)
        return found

    is_last = result is owner._awaited
    if is_last:
        owner._overflow = outcome.found_inf
        owner._awaited = None
    _take_note(
        owner,
        outcome.found_inf,
        lambda skipped: owner._device_scale.update(owner._loss_scaler, skipped=skipped),
        locate,
        outcome.norms,
    )


def _take_note(
    owner: Any,
    skipped: bool,
    update_scale: Callable[[bool], None],
    locate: Callable[[], list[checks.NonFinite]],
    norms: list[float],
) -> None:
    """Update scaler and counts, and log what was skipped."""
    scaler = owner._loss_scaler
    scale = scaler.cur_scale
    iteration = scaler.cur_iter if isinstance(scaler, DynamicLossScaler) else owner._iteration
    update_scale(skipped)
    owner._iteration += 1
    report = locate() if skipped else []
    if skipped:
        owner._weights.check_range()
        if owner.verbose:
            overflow = Overflow(report, scale, scaler.cur_scale)
            overflow.log(LOG, owner._skip_message(iteration, scale))
    owner._record.end(
        skipped,
        report,
        scale=lambda: owner._scaler_now().cur_scale,
        attempted=lambda: scale,
        owners=[owner],
        note=lambda: _note(owner, skipped, scale, norms),
    )


def _note(owner: Any, skipped: bool, scale: float, norms: list[float]) -> step_log.StepNote:
    value = owner._loss_scaler.loss_scale_value
    is_clipped = "grad_norms" in owner._legacy_arguments
    rule = getattr(owner.optimizer, "_rule", None)
    always_global = rule is not None and rule.clips_by_global_norm  # as FusedLAMB
    norm, clip = step_log.norm_and_clip(
        norms,
        owner.optimizer.param_groups if is_clipped else [{}] * len(norms),
        by_global_norm=always_global or owner.clip == "global",
    )
    return step_log.StepNote(
        skipped,
        scale,
        lowest=value.min_scale if isinstance(value, DynamicLossScale) else None,
        grad_norm=norm,
        clip=clip,
        overflow=owner._record.report if skipped else (),
    )


def check_groups(lists: Lists) -> tuple[FoundInf, list[float]]:
    """Check the gradients of each group; return what was found, and the l2 norm of each."""
    found = FoundInf()
    found.check_lists(lists)
    return found, found.group_norms(lists)
