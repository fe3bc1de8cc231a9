"""GradScaler: torch's, extended to float16 gradients and reports of skipped steps."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp._grad_scaler import stepping
from apex_mp.amp._grad_scaler.iteration import FLAGS, WATCHING_BACKWARD, Clip, Iteration
from apex_mp.amp._grad_scaler.outcomes import ScaledSteps, outcome
from apex_mp.amp._grad_scaler.stepping import is_fused
from apex_mp.amp._stages import Event, Stage
from apex_mp.core import forks, ops, readback, tensors
from apex_mp.core.log import warn
from apex_mp.core.state_checks import as_dict
from apex_mp.core.tensors import copy_async, params_of
from apex_mp.grads import measured as _measured
from apex_mp.grads import shards
from apex_mp.grads.found_inf import clip_divisor
from apex_mp.grads.grad_slots import Grads, GradSlots
from apex_mp.grads.in_host_memory import refuse_offloaded
from apex_mp.grads.nonfinite import NonFinite
from apex_mp.loss_scale import FLOAT32_MAX, FLOAT32_SMALLEST_NORMAL, DynamicLossScale, Rule
from apex_mp.masters import parallel_masters
from apex_mp.masters.cast_parameters import warn_of_rounded_buffers
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.scale.device_scale import DeviceScale
from apex_mp.step import step_log
from apex_mp.step.scaled_step import StepResult

# Dynamo cannot trace these methods; torch's own optimizers use this decorator too.
_eager = torch._disable_dynamo  # type: ignore[attr-defined]
_LOW = frozenset(LOW_PRECISION)
_NOTHING = contextlib.nullcontext()
_SCALE_EACH_LOSS = (
    "Call scaler.scale(loss).backward() in each iteration, and scaler.update() once at its end"
)
_NO_STEP = (
    "No inf checks were recorded prior to update. No optimizer whose parameters have gradients was "
    "given to scaler.step(optimizer) or scaler.unscale_(optimizer) since the last scaler.update()."
    " An FP16_Optimizer scales its loss itself: it needs no GradScaler."
)


class GradScaler(torch.amp.GradScaler):
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
    - gradients that wait for their step over an `update` are divided by their own scale;
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
        ValueError: `init_scale` is no positive normal float32 number, or `device` is another one;
            torch trains on with both.
        TypeError: `model` is no module, or `device` is one.
    """

    _has_16_bit_grads = False  # so far

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
        device = _checked_device(device, enabled)
        is_absent: Any = torch.cuda.amp.common.amp_definitely_not_available
        if device == "cuda" and enabled and is_absent():
            # As torch's, whose own warning would name a line of this file.
            warn(
                "GradScaler is enabled, but CUDA is not available. Disabling: losses are not "
                'scaled, and no step is skipped. On the CPU use GradScaler("cpu")',
                "no-gpu-nothing-is-scaled-or-cast",
                UserWarning,
            )
            enabled = False
        if enabled and not FLOAT32_SMALLEST_NORMAL <= init_scale <= FLOAT32_MAX:
            raise ValueError(
                f"GradScaler: init_scale is {init_scale}; it must lie in "
                f"[{FLOAT32_SMALLEST_NORMAL}, {FLOAT32_MAX}]"
            )
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"GradScaler: model is a {type(model).__name__}; it must be a torch.nn.Module"
            )
        self._min_scale, self._max_scale, self._hysteresis = min_scale, max_scale, hysteresis
        self._init_overflows = 0  # as torch's `_init_scale`
        self._on_device: DeviceScale | None = None
        if enabled and self._has_bounds:
            try:
                DynamicLossScale(init_scale, **self._rule._asdict())
            except (TypeError, ValueError) as error:
                said = str(error).replace("DynamicLossScale", "GradScaler", 1)
                raise type(error)(said) from None
        self._model = None if model is None else weakref.ref(model)
        self._check_buffers()
        parallel_masters.follow_join()
        # By optimizer, which is not kept alive; torch's `_per_optimizer_states` has them, too.
        self._iterations: weakref.WeakKeyDictionary[Any, Iteration] = weakref.WeakKeyDictionary()
        self._is_loss_scaled = False  # since the last update
        self._is_in_graph = False  # A replay of a CUDA graph scales without a call.
        self._has_warned_of_float16 = self._has_warned_of_unscaled = False

    @property
    def _has_bounds(self) -> bool:
        return (self._min_scale, self._max_scale, self._hysteresis) != (None, None, 1)

    @property
    def _rule(self) -> Rule:
        max_scale = math.inf if self._max_scale is None else self._max_scale
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        return Rule(*factors, self._lowest, max_scale, self._hysteresis)

    def __repr__(self) -> str:
        """Return the scale and its rule; the host waits for a GPU."""
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        rule = ", ".join(f"{name}={getattr(self._rule, name)}" for name in Rule._fields[:3])
        return f"{type(self).__name__}({self._device!r}, scale={self.get_scale()}, {rule})"

    # Losses.

    @_eager
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
        self._is_loss_scaled = True
        if readback.is_capturing():
            self._is_in_graph = True
        elif not self._has_warned_of_float16:
            # Another iterable may be one that can be read once.
            several = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
            for each in several:
                if isinstance(each, Tensor) and each.dtype is torch.float16:
                    self._warn_of_float16()
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
            is_here = scale.device == outputs.device
            output = outputs * (scale if is_here else copy_async(scale, outputs.device))
            if output.requires_grad:
                hook: Any = functools.partial(_begin_backward, weakref.ref(self))
                output.register_hook(hook)  # type: ignore[no-untyped-call]
            return output
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, dict)):
            raise ValueError(
                f"GradScaler.scale: an output is a {type(outputs).__name__}; outputs must be a "
                "Tensor or an iterable of Tensors"
            )
        scaled = map(self._scaled, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _warn_of_float16(self) -> None:
        """Warn, once, if the gradient of a float16 loss is inf."""
        if self._has_warned_of_float16:
            return
        self._has_warned_of_float16 = True
        scale = self.get_scale()
        if scale > torch.finfo(torch.float16).max:
            warn(
                f"GradScaler.scale: the loss is float16 and the scale is {scale:g}, which is inf "
                f"in float16, and so is the gradient of the loss: steps are skipped until the "
                "scale is 32768. Compute the loss in float32, of outputs.float() (loss.float() "
                "comes too late), or take GradScaler(init_scale=2.0**15, max_scale=2.0**15)",
                "a-float16-loss",
            )

    def _warn_of_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once that gradients are unscaled although no loss was scaled."""
        if self._is_in_graph or self._has_warned_of_unscaled or readback.is_capturing():
            return
        if any(param.grad is not None for param in params_of(optimizer)):
            self._has_warned_of_unscaled = True
            warn(
                "GradScaler.step: scaler.scale(loss) was not called since the last "
                f"scaler.update(), but the gradients of {type(optimizer).__name__} are divided by "
                f"the scale, {self.get_scale():g}. {_SCALE_EACH_LOSS}",
                "gradients-that-were-not-scaled",
            )

    # The iteration of an optimizer.

    def _begin(self, call: str, optimizer: torch.optim.Optimizer) -> tuple[Iteration, Tensor]:
        """Return the iteration of an optimizer, of which a method was called, and the scale."""
        _check_optimizer(call, optimizer)
        getattr(optimizer, "_step_supports_amp_scaling", None)
        try:
            scale, _ = self._check_scale_growth_tracker(call)
        except AssertionError as error:
            raise AssertionError(
                f"{error} GradScaler.{call}: scaler.scale(loss) was not called before, but the "
                f"gradients of {type(optimizer).__name__} are divided by the scale, "
                f"{self.get_scale():g}. {_SCALE_EACH_LOSS}"
            ) from None
        return self._iteration(optimizer), scale

    def _iteration(self, optimizer: torch.optim.Optimizer) -> Iteration:
        iteration = self._iterations.get(optimizer)
        if iteration is None:
            shards.refuse_fsdp1("GradScaler", optimizer)
            iteration = self._iterations[optimizer] = Iteration(optimizer)
            parallel_masters.add_scale(self, lambda scaler: scaler, [optimizer])
        of_torch = self._per_optimizer_states
        known = of_torch.get(id(optimizer))
        if known is not iteration:
            if known is not None:  # A subclass has asked torch for it.
                iteration.update(known)
            of_torch[id(optimizer)] = iteration
        iteration.follow_torch()
        return iteration

    @_eager
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients in place by the scale, once between two updates.

        A float16 gradient below 2**-25 becomes 0 and one below 2**-14 loses digits; `step` without
        `unscale_`, with a fused optimizer, and `clip_grad_norm_` in its place lose nothing.

        Args:
            optimizer: Owner of the gradients.

        Raises:
            RuntimeError: It was called before, or after `step`, or the optimizer scales by itself.
            TypeError: `optimizer` is something else.
        """
        if self._enabled:
            iteration, scale = self._begin("unscale_", optimizer)
            refuse_offloaded("unscale_", optimizer)
            iteration.after(Event.UNSCALE)
            self._unscale(optimizer, iteration, iteration.scale(scale), iteration.clip)

    def _unscale(
        self, optimizer: Any, iteration: Iteration, scale: Tensor, clip: Clip | None
    ) -> None:
        # As torch: a reciprocal of float32 may be imprecise.
        inv_scale = scale.double().reciprocal().float()
        if clip is not None:
            inv_scale = inv_scale / clip.divisor
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        iteration[FLAGS] = self._unscale_grads_(optimizer, inv_scale, found_inf, True)
        iteration.enter(Stage.UNSCALED)

    @_eager
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of an optimizer by the norm of all of them, unscaled.

        Without `unscale_` before it, the gradients of a fused optimizer are only read here; `step`
        unscales and clips them in its own pass. Those of another optimizer are unscaled and clipped
        here, in one pass. After `unscale_` this is torch's function.

        Args:
            optimizer: Owner of the gradients.
            max_norm: Gradients of a larger norm are scaled down to this one.
            norm_type: Only 2, unless `unscale_` was called [2].
            error_if_nonfinite: Raise if the norm is inf or NaN, which the host waits for [False].
            foreach: As in torch, after `unscale_` [None].

        Returns:
            The norm of the unscaled gradients before clipping: 0-dim, float32 or float64.

        Raises:
            RuntimeError: It was called before, or after `step`; or the norm is not finite.
            TypeError: `optimizer` is something else, such as the parameters.
            ValueError: `norm_type` is not 2 and `unscale_` was not called, or `max_norm` is
                negative or NaN.
        """
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"GradScaler.clip_grad_norm_: optimizer is a {type(optimizer).__name__}; call "
                "scaler.clip_grad_norm_(optimizer, max_norm), not with parameters"
            )
        max_norm = float(max_norm)
        if not max_norm >= 0.0:
            raise ValueError(
                f"GradScaler.clip_grad_norm_: max_norm is {max_norm}; it must be 0 or more"
            )
        iteration = None
        if self._enabled:
            iteration, scale = self._begin("clip_grad_norm_", optimizer)
            if self._is_in_graph:
                iteration.enter(iteration.after(Event.REPLAY))
            iteration.after(Event.CLIP)
            if iteration.stage is not Stage.UNSCALED:
                norm = stepping.clip(
                    self, optimizer, iteration, scale, max_norm, norm_type, error_if_nonfinite
                )
                if norm is not None:
                    return norm
                self.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            params_of(optimizer), max_norm, norm_type, error_if_nonfinite, foreach
        )
        norm = tensors.whole(norm)
        if iteration is not None and norm_type == 2.0 and step_log.listeners:
            iteration.noted = norm, clip_divisor(norm, max_norm).reciprocal()
        return norm

    def _measure(self, iteration: Iteration, grads: Grads, scale: Tensor) -> _measured.Measured:
        self._note_dtypes(grads.dtypes())
        measured = iteration.measured = _measured.measure(grads, scale)
        iteration[FLAGS] = measured.found.flags
        return measured

    def _note_dtypes(self, dtypes: Collection[torch.dtype]) -> None:
        self._has_16_bit_grads = self._has_16_bit_grads or not _LOW.isdisjoint(dtypes)

    @_eager
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
        iteration, scale = self._begin("step", optimizer)
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        inner = getattr(optimizer.step, "__self__", optimizer)
        if inner is not optimizer and is_fused(inner):
            # It would not see what is set on the optimizer outside it.
            raise TypeError(
                f"GradScaler.step: the step of this {type(optimizer).__name__} is that of the "
                f"{type(inner).__name__} inside; give the scaler that one"
            )
        readback.poll()
        iteration.after(Event.STEP)
        if not self._is_loss_scaled:
            self._warn_of_unscaled(optimizer)
        outcomes = iteration.outcomes
        if outcomes is None:
            self._check_buffers()
            outcomes = iteration.outcomes = ScaledSteps(optimizer, self._model, self)
        if iteration.stage is not Stage.READY:
            scale = iteration.scale(scale)
        iteration.is_stepping = True
        with self._announced(optimizer, iteration, scale) if step_log.listeners else _NOTHING:
            try:
                value = stepping.step(self, optimizer, iteration, scale, *args, **kwargs)
            finally:
                iteration.is_stepping = False
        iteration.enter(Stage.STEPPED)
        return value

    def _announced(
        self, optimizer: torch.optim.Optimizer, iteration: Iteration, scale: Tensor
    ) -> AbstractContextManager[None]:
        """Notify listeners of the step that the block takes, and of what was measured for it."""
        if iteration.noted is not None:
            norm, clip = iteration.noted
            step_log.measured(self, optimizer, grad_norm=norm, clip=clip)
        unscaled = tensors.FLOATING if iteration.stage is Stage.UNSCALED else ()
        return step_log.announced(
            self, optimizer, scale=scale, unscaled=unscaled, optimizer=optimizer
        )

    # Methods that torch calls, and that subclasses may replace.

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        grads = GradSlots(optimizer.param_groups).read()
        self._note_dtypes(grads.dtypes())
        fused = is_fused(optimizer)
        scale, _ = self._check_scale_growth_tracker("unscale_")
        measured = _measured.unscale(grads, inv_scale, scale, sums=fused)
        if fused:
            self._iteration(optimizer).measured = measured
        return measured.found.join(scale.device)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        iteration = self._iteration(optimizer)
        if iteration.clip is None:
            grads = GradSlots(optimizer.param_groups).read()
            self._measure(iteration, grads, scale).found.join(scale.device)
        return iteration[FLAGS]  # type: ignore[no-any-return]

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        iteration = self._iteration(optimizer)
        found = outcome(iteration[FLAGS], iteration.measured)
        value = None if found.found_inf else optimizer.step(*args, **kwargs)
        iteration.record.submit(StepResult(found), iteration.measured)
        return value

    # The scale.

    @_eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after the steps of an iteration, or set it.

        Args:
            new_scale: The scale from now on [None: adjust it].

        Raises:
            AssertionError: No optimizer with gradients was stepped since the last update.
            RuntimeError: An optimizer was stepped without this scaler after its step by it.
        """
        if not self._enabled:
            return
        scale, good_steps = self._check_scale_growth_tracker("update")
        for iteration in self._iterations.values():
            iteration.refuse_later_step()
        found_infs = [
            flag if flag.device == scale.device else copy_async(flag, scale.device)
            for state in self._per_optimizer_states.values()
            for flag in state[FLAGS].values()
        ]
        here, before = self._present_scale(scale, good_steps), scale
        if new_scale is not None:
            before = scale.clone()
            super().update(new_scale)
            here.overflows.zero_()
        elif not found_infs:
            raise AssertionError(_NO_STEP)
        for iteration in self._iterations.values():
            iteration.end(before, is_in_graph=self._is_in_graph)
        if new_scale is None:
            found_inf = found_infs[0] if len(found_infs) == 1 else torch.stack(found_infs).sum()
            ops.update_scale_(here.state, self._rule, found_inf)
        self._per_optimizer_states.clear()
        self._is_loss_scaled = False

    @property
    def _lowest(self) -> float:
        """The smallest scale that it backs off to."""
        if self._min_scale is not None:
            return self._min_scale
        # Below 1 float16 gradients have fewer digits than without a scale.
        lowest = 1.0 if self._has_16_bit_grads else FLOAT32_SMALLEST_NORMAL
        return min(lowest, self._max_scale or math.inf)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        here = self._on_device = DeviceScale(None, dev)
        here.fill(self._init_scale, self._init_growth_tracker, self._init_overflows)
        self._scale, self._growth_tracker = here.scale, here.good_steps

    def _present_scale(self, scale: Tensor, good_steps: Tensor) -> DeviceScale:
        """Return the scale on its device. torch's two tensors are views of it; others become so."""
        here = self._on_device
        if here is None or here.device != scale.device:
            here = self._on_device = DeviceScale(None, scale.device)
            here.overflows.fill_(self._init_overflows)
        if scale is not here.scale or good_steps is not here.good_steps:
            here.scale.copy_(scale)
            here.good_steps.copy_(good_steps)
            self._scale, self._growth_tracker = here.scale, here.good_steps
        return here

    def get_scale(self) -> float:
        """Return the scale; the host waits for a GPU.

        Raises:
            RuntimeError: This process was forked from the one that uses the GPU.
        """
        if self._enabled and self._scale is not None:
            forks.refuse_read("GradScaler: the scale", self._scale.device)
        return float(super().get_scale())

    # Outcomes.

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
        return self._enabled and self._outcomes_of(optimizer, "step_was_skipped").was_skipped

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
        return self._outcomes_of(optimizer, "overflow_report").report if self._enabled else []

    def _outcomes_of(self, optimizer: torch.optim.Optimizer, caller: str) -> ScaledSteps:
        _check_optimizer(caller, optimizer)
        iteration = self._iterations.get(optimizer)
        if iteration is None or iteration.outcomes is None:
            raise RuntimeError(
                f"GradScaler.{caller}: this {type(optimizer).__name__} was not stepped by "
                "scaler.step(optimizer); if another optimizer is around it, give the inner one"
            )
        return iteration.outcomes

    def _check_buffers(self) -> None:
        """Warn at a first step, too: the model may have become 16-bit since the constructor."""
        model = None if self._model is None else self._model()
        if model is not None and self._enabled and not readback.is_capturing():
            warn_of_rounded_buffers("GradScaler", model)

    # Checkpoints and pickles.

    def state_dict(self) -> dict[str, Any]:
        """Return the state: torch's five entries, and bounds if there are any.

        These are `min_scale`, `max_scale`, `hysteresis`, and `overflows`: how many there were since
        the scale last changed.
        """
        state = super().state_dict()
        return {**state, **self._bounds()} if state and self._has_bounds else state

    def _bounds(self) -> dict[str, Any]:
        here = self._on_device
        return {
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            "overflows": self._init_overflows if here is None else int(here.overflows),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a scaler, this one or torch's; bounds stay if it has none.

        Args:
            state_dict: What `state_dict()` has returned.

        Raises:
            RuntimeError: It is empty, as of a disabled scaler.
            TypeError: It is no dict.
            ValueError: It is something else's, and lacks a key.
        """
        state = as_dict("GradScaler", state_dict)
        missing = [key for key in super().state_dict() if key not in state]
        if state and missing:
            raise ValueError(
                f"GradScaler.load_state_dict: keys {missing} are missing; the dict has {[*state]}, "
                "and must be the state_dict() of a GradScaler"
            )
        super().load_state_dict(state)
        bounds = {**self._bounds(), "overflows": 0}
        bounds = {name: state.get(name, bound) for name, bound in bounds.items()}
        self._min_scale, self._max_scale, self._hysteresis, self._init_overflows = bounds.values()
        if self._on_device is not None:
            self._on_device.overflows.fill_(self._init_overflows)

    def __getstate__(self) -> dict[str, Any]:
        # Iterations and the model belong to objects that are not copied with the scaler.
        mine = dict.fromkeys(("_model", "_iterations", "_on_device"))
        return {**super().__getstate__(), **mine, "_init_overflows": self._bounds()["overflows"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._iterations = weakref.WeakKeyDictionary()


def _checked_device(device: Any, enabled: bool) -> str:
    """Return "cuda" or "cpu"; an index is left out. A disabled scaler takes any device."""
    if isinstance(device, torch.nn.Module):
        raise TypeError(
            f'GradScaler: device is a {type(device).__name__}; it must be "cuda" or "cpu". A '
            "module is given as model="
        )
    with contextlib.suppress(RuntimeError, TypeError):
        kind = torch.device(device).type
        if kind in ("cuda", "cpu"):
            return kind
    if enabled:
        raise ValueError(f'GradScaler: device is {device!r}; it must be "cuda" or "cpu"')
    return device  # type: ignore[no-any-return]


def _begin_backward(reference: weakref.ref[GradScaler], _: Tensor) -> None:
    scaler = reference()
    for iteration in () if scaler is None else scaler._iterations.values():
        if iteration.stage in WATCHING_BACKWARD:
            iteration.begin_backward()


def _check_optimizer(caller: str, optimizer: Any) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"GradScaler.{caller}: optimizer is a {type(optimizer).__name__}; it must be an "
            "optimizer, which has param_groups"
        )
