"""GradScaler: torch's, extended to float16 gradients and reports of skipped steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from apex_mp.amp.grad_scaling.scale_bounds import ScaleBounds, eager, with_advice
from apex_mp.amp.grad_scaling.scaled_losses import ScaledLosses
from apex_mp.amp.grad_scaling.scaled_steps import ScaledSteps, outcome
from apex_mp.amp.grad_scaling.torch_fused import (
    is_fused,
    removing_new_momentum,
    wait_for_amp_tensors,
)
from apex_mp.amp.grad_scaling.unscaling import (
    MEASURED,
    NOTED,
    UnscalingGradScaler,
    refuse_no_optimizer,
    refuse_own_scaling,
    refuse_step_of_another,
)
from apex_mp.core.grads.checks import NonFinite
from apex_mp.core.grads.found_inf import one_flag
from apex_mp.core.masters.cast_parameters import warn_of_rounded_buffers
from apex_mp.core.step import readback, step_log
from apex_mp.core.step.scaled_step import ScaledStep, StepResult, take, takes_scaled_step
from apex_mp.core.tensors import copy_async

_FLAG_OF = "apex_mp_flag_of"  # in torch's state: the optimizer that has found_inf, and its steps
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextlib.contextmanager
def _taking_grad_scale(optimizer: Any) -> Iterator[None]:
    """A context for a step, which uses up a `grad_scale` that the user has set, as torch's does."""
    try:
        yield
    finally:
        vars(optimizer).pop("grad_scale", None)


class GradScaler(UnscalingGradScaler):
    """Scale the loss so that small gradients survive float16; skip steps that overflow.

        scaler = GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    It replaces `torch.amp.GradScaler` in any loop, with the same scales, gradients and checkpoints
    where parameters are float32. In addition

    - gradients may be float16 (`model.half()`), also in `unscale_`;
    - `clip_grad_norm_` clips without a pass of its own if the optimizer is fused;
    - `step_was_skipped` and `overflow_report` give the outcome of a step, and a warning names the
      parameters after 50 skipped steps in a row;
    - the scale has bounds and hysteresis if asked for.

    On a GPU the host waits for nothing with a fused optimizer, ours or torch's, else once a step.

    Args:
        device: "cuda" or "cpu" ["cuda"].
        init_scale: First scale [2**16].
        growth_factor: Growth multiplies the scale by this, more than 1 [2].
        backoff_factor: Backing off multiplies the scale by this, less than 1 [0.5].
        growth_interval: Steps without inf or NaN in a row before the scale grows [2000].
        enabled: With False nothing is scaled or skipped [True].
        min_scale: The lowest scale [None: 1 once gradients have 16 bits, else 2**-126; torch's: 0].
        max_scale: The scale does not grow above this [None: no bound].
        hysteresis: Overflows until the scale backs off, then at each until it has grown [1].
        model: The module whose names messages use for parameters [None: the names that the
            optimizer was given, else group and index].

    Raises:
        AssertionError: A factor is out of range; torch's own check.
        TypeError, ValueError: A bound or `hysteresis` is no number, or out of range.
        ValueError: `init_scale` is no positive normal float32 number; torch trains on with it.
        TypeError: `model` is no module, or `device` is one.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        model: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(
            ScaleBounds(min_scale, max_scale, hysteresis),
            device=device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"GradScaler: model is a {type(model).__name__}; it must be a torch.nn.Module"
            )
        self._model = None if model is None else weakref.ref(model)
        self._check_buffers()
        self._losses = ScaledLosses()

    @eager
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of several, by the scale.

        Args:
            outputs: A tensor or an iterable of them. A float16 loss gets a warning if its gradient,
                which is the scale, is inf in float16.

        Returns:
            The scaled outputs: a Tensor, a list or tuple of the same type, or an iterator for any
            other iterable.

        Raises:
            ValueError: An output is neither a Tensor nor an iterable of Tensors.
        """
        if not self._enabled:
            return outputs
        self._losses.take(self, outputs)
        return self._scaled(outputs)

    def _scaled(self, outputs: Any) -> Any:
        """Return scaled outputs.

        torch's method copies the scale to the CPU with non_blocking=True, so an output there may be
        multiplied before the scale arrives.
        """
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            scale, _ = self._check_scale_growth_tracker("scale")
            scaled_output = outputs * copy_async(scale, outputs.device)
            self._watch_unscaled(scaled_output)
            return scaled_output
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, dict)):
            raise ValueError(
                f"GradScaler.scale: an output is a {type(outputs).__name__}; outputs must be a "
                "Tensor or an iterable of Tensors"
            )
        scaled = map(self._scaled, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    @eager
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step an optimizer with unscaled gradients, or skip if one holds inf or NaN.

        Args:
            optimizer: Owner of the gradients.
            args: Passed on to `optimizer.step`.
            kwargs: Likewise.

        Returns:
            What `optimizer.step` returned; None if it is not fused and the step was skipped.

        Raises:
            AssertionError: No parameter of an optimizer that is not fused has a gradient.
            RuntimeError: It was called before since the last `update`, a closure was given, the
                optimizer scales by itself, or gradients came after `clip_grad_norm_`.
            TypeError: `optimizer` is something else, or its step is that of a fused one inside.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        refuse_no_optimizer("step", optimizer)
        refuse_own_scaling(optimizer)
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        refuse_step_of_another(optimizer)
        readback.poll()
        self._clip_of(optimizer)  # What it raises comes before a warning.
        self._refuse_mixed(optimizer, "step")
        self._losses.check(self, optimizer)
        waiting = self._waiting.pop(optimizer, None)
        if waiting is not None and self._scale is not None:
            waiting.check(type(optimizer).__name__, self._scale)
        steps = self._steps_of(optimizer)
        with steps.watching_updates(), self._announced(optimizer):
            if takes_scaled_step(optimizer):
                return self._step_scaled(optimizer, steps, *args, **kwargs)
            if is_fused(optimizer):
                return self._step_fused(optimizer, steps, *args, **kwargs)
            return self._step_other(optimizer, *args, **kwargs)

    def _announced(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Notify listeners of the step that the block takes, and of what was measured for it."""
        if not step_log.listeners or self._scale is None:
            return contextlib.nullcontext()
        state = self._per_optimizer_states[id(optimizer)]
        if NOTED in state:
            norm, clip = state[NOTED]
            step_log.measured(self, optimizer, grad_norm=norm, clip=clip)
        unscaled = _FLOATING if state["stage"] is OptState.UNSCALED else ()
        return step_log.announced(
            self, optimizer, scale=self._scale, unscaled=unscaled, optimizer=optimizer
        )

    def _step_scaled(
        self, optimizer: Any, steps: ScaledSteps, *args: Any, **kwargs: Any
    ) -> float | None:
        """Step a fused optimizer of this package, which checks gradients in its own passes."""
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        is_unscaled = state["stage"] is OptState.UNSCALED
        known: dict[torch.device, Tensor] = state["found_inf_per_device"] if is_unscaled else {}
        with self._applying_clip(optimizer) as clip, _taking_grad_scale(optimizer):
            if is_unscaled:
                step = ScaledStep(found_inf=one_flag(known, scale.device))
            else:
                step = self._scaled_step(optimizer, None if clip is None else clip.max_norm)
            if clip is not None:  # Gradients that a hook edits are clipped as they were measured.
                step.clip_norm, step.found_inf = clip.norm, clip.found_inf
            value = self._take(optimizer, step, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        result = step.result
        if result is None or is_unscaled:
            undo_state = None if result is None else result.undo_state
            steps.submit_flags(state["found_inf_per_device"], state.get(MEASURED), undo_state)
        else:
            self._note_dtypes(result.grad_dtypes)
            steps.submit(result)
        return value

    def _take(self, optimizer: Any, step: ScaledStep, *args: Any, **kwargs: Any) -> float | None:
        """Take a step, and note its flag for `update`, whatever was put around `optimizer.step`."""
        state = self._per_optimizer_states[id(optimizer)]
        try:
            value: float | None = take(optimizer, step, *args, **kwargs)
        finally:
            if step.result is None:  # A function around the step leaves it out, or has raised.
                if not state["found_inf_per_device"]:
                    self._check_inf_per_device(optimizer)
            elif step.check and step.result.grad_dtypes:
                self._note_flag(optimizer, step.result.flag())
                state[_FLAG_OF] = weakref.ref(optimizer), optimizer._own_masters.counts.steps
        return value

    def _step_fused(
        self, optimizer: Any, steps: ScaledSteps, *args: Any, **kwargs: Any
    ) -> float | None:
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        try:
            with (
                self._applying_clip(optimizer) as clip,
                wait_for_amp_tensors(optimizer, scale.device),
                removing_new_momentum(optimizer, state),
            ):
                if clip is not None:
                    optimizer.grad_scale = clip.divisor * getattr(optimizer, "grad_scale", 1)
                value = super().step(optimizer, *args, **kwargs)
        finally:
            # torch removes the first two, but not if the step raises an error.
            for name in ("grad_scale", "found_inf"):
                with contextlib.suppress(AttributeError):
                    delattr(optimizer, name)
        steps.submit_flags(state["found_inf_per_device"], state.get(MEASURED))
        return value

    def _step_other(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        try:
            return super().step(optimizer, *args, **kwargs)
        except AssertionError as error:
            raise with_advice(
                error,
                "No inf checks were recorded for this optimizer.",
                f" No parameter of this {type(optimizer).__name__} has a gradient: it must own "
                "parameters that the scaled loss depends on, and zero_grad() must come before "
                "backward().",
            ) from None

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        measured = optimizer_state.get(MEASURED)
        found = outcome(optimizer_state["found_inf_per_device"], measured)
        value = None if found.found_inf else optimizer.step(*args, **kwargs)
        self._steps_of(optimizer).submit(StepResult(found), measured)
        return value

    def _steps_of(self, optimizer: torch.optim.Optimizer) -> ScaledSteps:
        steps = self._steps.get(optimizer)
        if steps is None:
            self._check_buffers()
            steps = self._steps[optimizer] = ScaledSteps(optimizer, self._model, self)
        return steps

    def _check_buffers(self) -> None:
        """Warn at a first step, too: the model may have become 16-bit since the constructor."""
        model = None if self._model is None else self._model()
        if model is not None and self._enabled and not readback.is_capturing():
            warn_of_rounded_buffers("GradScaler", model)

    @eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after the steps of an iteration, or set it.

        Args:
            new_scale: The scale from now on [None: adjust it].

        Raises:
            AssertionError: No optimizer with gradients was stepped since the last update.
        """
        if self._enabled:
            self._refuse_lost_flags()
            self._note_waiting()
        super().update(new_scale)
        self._losses.forget()
        for clip in self._clips.values():
            clip.is_late, clip.is_replayed = True, self._losses.are_replayed()

    def _refuse_lost_flags(self) -> None:
        """Raise a RuntimeError if a later step has overwritten whether one was skipped."""
        for state in self._per_optimizer_states.values():
            reference, steps_taken = state.get(_FLAG_OF, (lambda: None, 0))
            optimizer = reference()
            if optimizer is not None and optimizer._own_masters.counts.steps != steps_taken:
                raise RuntimeError(
                    f"GradScaler.update: {type(optimizer).__name__} was stepped again after "
                    "scaler.step(optimizer), without this scaler; call scaler.update() before that"
                )

    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's last step was skipped, because a gradient held inf or NaN.

        A learning-rate schedule or a moving average of weights follows the steps that were taken:

            if not scaler.step_was_skipped(optimizer): scheduler.step()

        On a GPU the host waits for the step, if the optimizer is fused.

        Args:
            optimizer: One that this scaler has stepped.

        Raises:
            RuntimeError: This scaler has not stepped the optimizer.
            TypeError: `optimizer` is something else.
        """
        return self._enabled and self._taken_steps_of(optimizer, "step_was_skipped").was_skipped

    def overflow_report(self, optimizer: torch.optim.Optimizer) -> list[NonFinite]:
        """Return which gradients held how many inf and NaN in an optimizer's last skipped step.

        The worst come first; the list is empty if no step was skipped. On a GPU the host waits,
        and with a fused optimizer there are no counts if gradients were cleared before.

        Args:
            optimizer: One that this scaler has stepped.

        Raises:
            RuntimeError: This scaler has not stepped the optimizer.
            TypeError: `optimizer` is something else.
        """
        return self._taken_steps_of(optimizer, "overflow_report").report if self._enabled else []

    def _taken_steps_of(self, optimizer: torch.optim.Optimizer, caller: str) -> ScaledSteps:
        refuse_no_optimizer(caller, optimizer)
        steps = self._steps.get(optimizer)
        if steps is None:
            raise RuntimeError(
                f"GradScaler.{caller}: this {type(optimizer).__name__} was not stepped by "
                "scaler.step(optimizer); if another optimizer is around it, give the inner one"
            )
        return steps

    def __getstate__(self) -> dict[str, Any]:
        # Steps and the model belong to objects that are not copied with the scaler.
        weak = dict.fromkeys(("_model", "_steps", "_clips", "_waiting"))
        return {**super().__getstate__(), **weak}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._steps, self._clips = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
        self._waiting = weakref.WeakKeyDictionary()
