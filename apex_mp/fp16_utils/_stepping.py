"""The ways in which FP16_Optimizer steps: fused, by the legacy call, plain, with a closure."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from apex_mp.core.masters.master_grads import Stage
from apex_mp.core.masters.masters import write
from apex_mp.core.step import device_scale, step_log
from apex_mp.core.step.closure import Snapshot, StepAbandonedError, evaluate
from apex_mp.core.step.scaled_step import ScaledStep, take, takes_scaled_step
from apex_mp.core.step.skips import Overflow
from apex_mp.fp16_utils._outcomes import Outcomes, check_groups
from apex_mp.fp16_utils._parts import LOG
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler


class Stepping(Outcomes):
    """The layer that steps the inner optimizer."""

    def _scale_now(self) -> float | Tensor:
        """Return the factor on the loss: a tensor if the host does not wait for its device."""
        device = self._device_to_leave_alone()
        if device is None:
            return self._scaler_now().cur_scale
        return self._device_scale.scale(self._loss_scaler, device)

    def _device_to_leave_alone(self) -> torch.device | None:
        """Return the device on which the host need not wait for steps, or None."""
        scaler = self._loss_scaler
        if type(scaler) not in (LossScaler, DynamicLossScaler) or "update_scale" in vars(scaler):
            return None  # Its update_scale is to be called after each step.
        params = (param for group in self.param_groups for param in group["params"])
        first = next(params, None)
        if first is None or first.device.type not in device_scale.DEVICE_TYPES:
            return None
        return first.device if self._can_step_fused() else None

    def _unscale_what_came_in(self) -> None:
        """Unscale new gradients, whichever backward made them, unless they are unscaled already."""
        if self._grads.has_new_grads() or self._misuse.edits_count():
            self.update_master_grads()
        elif self._grads.stage is Stage.READY:
            self._forget_overflow()  # There are no gradients: the last step's overflow is over.

    def _announced(self) -> AbstractContextManager[None]:
        if not step_log.listeners:
            return contextlib.nullcontext()
        scale = self._grads.scale_of_grads()
        return step_log.announced(self, scale=scale, unscaled=(torch.float32, torch.float64))

    def _step_without_closure(self) -> tuple[bool | None, Any]:
        """Step; return whether it was skipped, if that is known, and the inner step's result."""
        if not self._legacy_arguments:
            return self._step_plain()
        return (self._step_fused(), None) if self._can_step_fused() else self._step_legacy()

    def _can_step_fused(self) -> bool:
        # Hooks run only for steps that are not skipped, so overflows must be known before them.
        # Another function in the place of `step` may read `.grad`.
        is_plain = getattr(self.optimizer.step, "takes_scaled_step", False)
        return (
            takes_scaled_step(self.optimizer)
            and is_plain
            and not (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or self.optimizer._optimizer_step_pre_hooks
                or self.optimizer._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            )
        )

    def _step_fused(self) -> bool | None:
        """Step a fused optimizer, which checks gradients itself; return whether it was skipped."""
        grads_of, copies, scale = self._grads.sources(self.param_groups)
        device = self._device_to_leave_alone()
        step = ScaledStep(
            grads_of=grads_of,
            copies=copies,
            scale=scale,
            check=True,
            clip_by_global_norm=self.clip == "global",
            loss_scale=None
            if device is None
            else self._device_scale.for_step(self._loss_scaler, device),
            wait=device is None,
        )
        take(self.optimizer, step)
        result = step.result
        if result is None:
            raise RuntimeError(
                f"FP16_Optimizer: {type(self.optimizer).__name__}.step was replaced by a function "
                "that has its attributes and has not called it; it must call it"
            )
        outcome = result.outcome
        if not outcome.found_inf:
            # The user may have written to masters that have no gradient.
            slots = self._grads.slots(self.param_groups)
            places = [(slots.models[i][k], slots.groups[i][k]) for i, k in result.without_grad]
            write([(model, master) for model, master in places if model is not None])
        if outcome.is_known:
            self._group_norms = outcome.norms
            return outcome.found_inf
        self._awaited = result
        return None

    def _step_plain(self) -> tuple[bool, Any]:
        """Step an inner optimizer that reads `.grad`; return as _step_without_closure."""
        if self._overflow_now():
            return True, None
        self._call_hooks(self._optimizer_step_pre_hooks)
        if self._optimizer_step_pre_hooks:
            self._unscale_what_came_in()  # A hook may edit gradients.
            if self._overflow_now():
                return True, None
        self._watch.before_step()
        value = self.optimizer.step()
        self._watch.after_step(self.optimizer)
        self._call_hooks(self._optimizer_step_post_hooks)
        return False, value

    def _overflow_now(self) -> bool:
        self._overflow = None  # An edit, by way of .data too, may have written inf or NaN.
        return self.overflow

    def _step_legacy(self) -> tuple[bool, Any]:
        """Step an inner optimizer that takes scaled gradients; return as _step_without_closure."""
        lists, scale = self._grads.collect(self.param_groups)
        found, norms = check_groups(lists)
        if found:
            return True, None
        if self._optimizer_step_pre_hooks:
            self._call_hooks(self._optimizer_step_pre_hooks)
            lists, scale = self._grads.collect(self.param_groups)  # A hook may edit gradients.
            found, norms = check_groups(lists)
            if found:
                return True, None
        factor = float(scale)
        self._group_norms = [norm / factor for norm in norms]
        if self.clip == "global":
            norms = [math.hypot(*norms)] * len(norms)
        models = self._grads.slots(self.param_groups).models
        arguments = {
            "grads": lists,
            "output_params": models,
            "scale": factor,
            "grad_norms": norms,
        }
        value = self.optimizer.step(**{name: arguments[name] for name in self._legacy_arguments})
        self._masters.copy_to_model(except_for=self._written(lists))
        self._call_hooks(self._optimizer_step_post_hooks)
        return False, value

    def _written(self, lists: list[list[Tensor | None]]) -> set[int]:
        """Return ids of the model parameters that the inner optimizer's step has written itself."""
        if not getattr(self.optimizer, "_writes_output_params", False):
            return set()
        return {
            id(model)
            for one, models in zip(lists, self._grads.slots(self.param_groups).models, strict=True)
            for grad, model in zip(one, models, strict=True)
            if grad is not None
        }

    def _call_hooks(self, hooks: OrderedDict[int, Any]) -> None:
        for hook in hooks.values():
            hook(self, (), {})

    def _step_with_closure(self, closure: Callable[[], Any]) -> tuple[bool, Any]:
        """Step an inner optimizer that may call a closure many times; as _step_without_closure."""
        params = [param for group in self.param_groups for param in group["params"]]
        before = Snapshot(params, self.state)
        self.first_closure_call_this_step = True
        self._call_hooks(self._optimizer_step_pre_hooks)
        try:
            value = self.optimizer.step(lambda: self._evaluate(closure))
        except StepAbandonedError:
            before.restore(self.state)
            self._masters.copy_to_model()
            return True, None
        self._masters.copy_to_model()
        self._call_hooks(self._optimizer_step_post_hooks)
        return False, value

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not self.first_closure_call_this_step:
            self._masters.copy_to_model()  # A line search has moved the masters.
        self.first_closure_call_this_step = False
        return evaluate(closure, self._overflowed, self._back_off)

    def _overflowed(self) -> bool:
        self._misuse.check_clip()
        self._unscale_what_came_in()
        return self.overflow

    def _back_off(self) -> bool:
        scaler = self._scaler_now()
        scale = scaler.cur_scale
        if scaler.loss_scale_value.update(True).scale >= scale:
            return False
        scaler.update_scale(True)
        if self.verbose:
            LOG.warning(
                "OVERFLOW within closure! Skipping step. Attempted loss scale: %s, reducing to %s",
                scale,
                scaler.cur_scale,
                extra={"overflow": Overflow(self._locate(), scale, scaler.cur_scale)},
            )
        return True
