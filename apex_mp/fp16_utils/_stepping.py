"""The ways in which an FP16_Optimizer steps: fused, by the legacy call, plain, with a closure.

Each function is given the FP16_Optimizer; those that step return whether the step was skipped, if
that is known, and what the inner optimizer's step returned.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from apex_mp.core import readback
from apex_mp.core.log import logger, see
from apex_mp.core.tensors import Lists, params_of
from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.nonfinite import NonFinite, Overflow, locate_nonfinite
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.masters.master_grads import Stage
from apex_mp.masters.masters import write
from apex_mp.scale.fp16_scalers import DynamicLossScaler
from apex_mp.step import step_log
from apex_mp.step.closure import Snapshot, StepAbandonedError, evaluate
from apex_mp.step.scaled_step import (
    HostOutcome,
    Outcome,
    ScaledStep,
    StepResult,
    take,
    takes_scaled_step,
)

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

    def locate() -> list[NonFinite]:
        grads, names = owner._grads, owner._names
        if is_last and grads.stage is Stage.STEPPED and not grads.has_new_grads():
            return locate_nonfinite(names.grads(owner.optimizer.param_groups))
        rows, without_grad = outcome.nonfinite_rows, result.without_grad
        found: list[NonFinite] = names.rows(rows, without_grad, owner.optimizer.param_groups)
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
    locate: Callable[[], list[NonFinite]],
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


def announced(owner: Any) -> AbstractContextManager[None]:
    """Return a context for a step, of which listeners hear."""
    if not step_log.listeners:
        return contextlib.nullcontext()
    scale = owner._grads.scale_of_grads()
    return step_log.announced(owner, scale=scale, unscaled=(torch.float32, torch.float64))


def step_without_closure(owner: Any) -> tuple[bool | None, Any]:
    """Step; return whether it was skipped, if that is known, and the inner step's result."""
    if not owner._legacy_arguments:
        return _step_plain(owner)
    return (_step_fused(owner), None) if can_step_fused(owner) else _step_legacy(owner)


def can_step_fused(owner: Any) -> bool:
    """Return whether the inner optimizer's step checks gradients, unscales and writes the model."""
    # Hooks run only for steps that are not skipped, so overflows must be known before them.
    # Another function in the place of `step` may read `.grad`.
    is_plain = getattr(owner.optimizer.step, "takes_scaled_step", False)
    return (
        takes_scaled_step(owner.optimizer)
        and is_plain
        and not (
            owner._optimizer_step_pre_hooks
            or owner._optimizer_step_post_hooks
            or owner.optimizer._optimizer_step_pre_hooks
            or owner.optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
    )


def _step_fused(owner: Any) -> bool | None:
    """Step a fused optimizer, which checks gradients itself; return whether it was skipped."""
    grads_of, copies, scale = owner._grads.sources(owner.optimizer.param_groups)
    device = owner._device_to_leave_alone()
    step = ScaledStep(
        grads_of=grads_of,
        copies=copies,
        scale=scale,
        check=True,
        clip_by_global_norm=owner.clip == "global",
        loss_scale=None
        if device is None
        else owner._device_scale.for_step(owner._loss_scaler, device),
        wait=device is None,
    )
    take(owner.optimizer, step)
    result = step.result
    if result is None:
        raise RuntimeError(
            f"FP16_Optimizer: {type(owner.optimizer).__name__}.step was replaced by a function "
            "that has its attributes and has not called it; it must call it"
        )
    outcome = result.outcome
    if not outcome.found_inf:
        # The user may have written to masters that have no gradient.
        slots = owner._grads.slots(owner.optimizer.param_groups)
        places = [(slots.models[i][k], slots.groups[i][k]) for i, k in result.without_grad]
        write([(model, master) for model, master in places if model is not None])
    if outcome.is_known:
        owner._group_norms = outcome.norms
        return outcome.found_inf
    owner._awaited = result
    return None


def _step_plain(owner: Any) -> tuple[bool, Any]:
    """Step an inner optimizer that reads `.grad`; return as step_without_closure."""
    if _overflow_now(owner):
        return True, None
    _call_hooks(owner, owner._optimizer_step_pre_hooks)
    if owner._optimizer_step_pre_hooks:
        owner._unscale_what_came_in()  # A hook may edit gradients.
        if _overflow_now(owner):
            return True, None
    owner._watch.before_step()
    value = owner.optimizer.step()
    owner._watch.after_step(owner.optimizer)
    _call_hooks(owner, owner._optimizer_step_post_hooks)
    return False, value


def _overflow_now(owner: Any) -> bool:
    owner._overflow = None  # An edit, by way of .data too, may have written inf or NaN.
    return bool(owner.overflow)


def _step_legacy(owner: Any) -> tuple[bool, Any]:
    """Step an inner optimizer that takes scaled gradients; return as step_without_closure."""
    lists, scale = owner._grads.collect(owner.optimizer.param_groups)
    found, norms = check_groups(lists)
    if found:
        return True, None
    if owner._optimizer_step_pre_hooks:
        _call_hooks(owner, owner._optimizer_step_pre_hooks)
        lists, scale = owner._grads.collect(
            owner.optimizer.param_groups
        )  # A hook may edit gradients.
        found, norms = check_groups(lists)
        if found:
            return True, None
    factor = float(scale)
    owner._group_norms = [norm / factor for norm in norms]
    if owner.clip == "global":
        norms = [math.hypot(*norms)] * len(norms)
    models = owner._grads.slots(owner.optimizer.param_groups).models
    arguments = {
        "grads": lists,
        "output_params": models,
        "scale": factor,
        "grad_norms": norms,
    }
    value = owner.optimizer.step(**{name: arguments[name] for name in owner._legacy_arguments})
    owner._masters.copy_to_model(except_for=_written(owner, lists))
    _call_hooks(owner, owner._optimizer_step_post_hooks)
    return False, value


def _written(owner: Any, lists: list[list[Tensor | None]]) -> set[int]:
    """Return ids of the model parameters that the inner optimizer's step has written itself."""
    if not getattr(owner.optimizer, "_writes_output_params", False):
        return set()
    return {
        id(model)
        for one, models in zip(
            lists, owner._grads.slots(owner.optimizer.param_groups).models, strict=True
        )
        for grad, model in zip(one, models, strict=True)
        if grad is not None
    }


def _call_hooks(owner: Any, hooks: OrderedDict[int, Any]) -> None:
    for hook in hooks.values():
        hook(owner, (), {})


def step_with_closure(owner: Any, closure: Callable[[], Any]) -> tuple[bool, Any]:
    """Step an inner optimizer that may call a closure many times; as step_without_closure."""
    params = params_of(owner.optimizer)
    before = Snapshot(params, owner.optimizer.state)
    owner.first_closure_call_this_step = True
    _call_hooks(owner, owner._optimizer_step_pre_hooks)
    try:
        value = owner.optimizer.step(lambda: _evaluate(owner, closure))
    except StepAbandonedError:
        before.restore(owner.optimizer.state)
        owner._masters.copy_to_model()
        return True, None
    owner._masters.copy_to_model()
    _call_hooks(owner, owner._optimizer_step_post_hooks)
    return False, value


def _evaluate(owner: Any, closure: Callable[[], Any]) -> Any:
    if not owner.first_closure_call_this_step:
        owner._masters.copy_to_model()  # A line search has moved the masters.
    owner.first_closure_call_this_step = False
    return evaluate(
        closure, functools.partial(_overflowed, owner), functools.partial(_back_off, owner)
    )


def _overflowed(owner: Any) -> bool:
    owner._misuse.check_clip()
    owner._unscale_what_came_in()
    return bool(owner.overflow)


def _back_off(owner: Any) -> bool:
    scaler = owner._scaler_now()
    scale = scaler.cur_scale
    if scaler.loss_scale_value.update(True).scale >= scale:
        return False
    scaler.update_scale(True)
    if owner.verbose:
        LOG.warning(
            "OVERFLOW within closure! Skipping step. Attempted loss scale: %s, reducing to %s",
            scale,
            scaler.cur_scale,
            extra={"overflow": Overflow(owner._locate(), scale, scaler.cur_scale)},
        )
    return True
