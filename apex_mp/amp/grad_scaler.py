"""GradScaler: that of torch, which also takes float16 gradients and tells of skipped steps."""

from __future__ import annotations

import contextlib
import types
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from apex_mp import _C, _step_notes, device_scale
from apex_mp.amp import _scaled_grads
from apex_mp.amp._scale_bounds import BoundedGradScaler, ScaleBounds, eager, with_advice
from apex_mp.amp._scaled_steps import ScaledSteps
from apex_mp.grads import NonFinite
from apex_mp.loss_scale import FLOAT32_SMALLEST_NORMAL

# Keys beside torch's in the state of an optimizer, which lasts until update().
_MEASURED = "apex_mp_measured"  # what a pass that only reads has found
_CLIP = "apex_mp_clip"  # what gradients are divided by beside the scale, to clip them
_CLIPPED = "apex_mp_clipped"  # the gradients that this was measured for
_NOTED = "apex_mp_noted"  # norm and clip factor, for who listens to the step

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class GradScaler(BoundedGradScaler):
    """Scale the loss so that small gradients survive float16; skip steps that overflow.

    It takes the place of `torch.amp.GradScaler` in any loop: with float32 parameters it has the
    same scales, gradients and checkpoints. Beyond that

    - gradients may be float16 (`model.half()`), also in `unscale_`;
    - `clip_grad_norm_` clips without a pass of its own if the optimizer is fused;
    - `step_was_skipped` and `overflow_report` say what became of a step, and a warning names the
      parameters after 50 skipped steps in a row;
    - the scale has bounds and hysteresis if asked for.

    On a GPU the host waits for nothing if the optimizer is fused, ours or torch's; with others it
    waits once a step, as torch's does.

    Args:
        device: "cuda" or "cpu" ["cuda"].
        init_scale: First scale [2**16].
        growth_factor: Growth multiplies the scale by this, more than 1 [2].
        backoff_factor: Backing off multiplies the scale by this, less than 1 [0.5].
        growth_interval: Steps without inf or NaN in a row before the scale grows [2000].
        enabled: With False nothing is scaled or skipped [True].
        min_scale: The scale does not back off below this [None: no bound; torch's sinks to 0].
        max_scale: The scale does not grow above this [None: no bound].
        hysteresis: Overflows before the scale backs off [1].
        model: The module whose names messages and reports use for its parameters [None: those of
            (name, parameter) pairs that the optimizer was given, else group and index].

    Raises:
        AssertionError: A factor is out of range, as torch says it.
        TypeError, ValueError: A bound or `hysteresis` is no number, or out of range.
        TypeError: `model` is no module.
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
        self._steps: weakref.WeakKeyDictionary[Any, ScaledSteps] = weakref.WeakKeyDictionary()

    # Gradients.

    @eager
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients in place by the scale, once between two updates.

        A float16 gradient below 2**-25 becomes 0 and one below 2**-14 loses digits; `step` without
        `unscale_`, with a fused optimizer, and `clip_grad_norm_` in its place lose nothing.

        Args:
            optimizer: Owner of the gradients.

        Raises:
            RuntimeError: It was called before, or after `step`, or the optimizer scales by itself.
        """
        if self._enabled:
            _refuse_own_scaling(optimizer)
        super().unscale_(optimizer)

    @eager
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of an optimizer by the norm of all of them, unscaled.

        Without `unscale_` before it gradients are only read here. A fused optimizer's are left as
        they are until `step`, which unscales and clips them in its own pass; those of others are
        unscaled and clipped in one pass. After `unscale_` it is torch's function.

        Args:
            optimizer: Owner of the gradients.
            max_norm: They are scaled down to this norm if theirs is larger.
            norm_type: Only 2, unless `unscale_` was called [2].
            error_if_nonfinite: Raise if the norm is inf or NaN, which the host waits for [False].
            foreach: As in torch, after `unscale_` [None].

        Returns:
            The norm of the unscaled gradients before clipping: 0-dim, float32 or float64.

        Raises:
            RuntimeError: It was called before, or after `step`; or the norm is not finite.
            TypeError: `optimizer` is something else, such as the parameters.
            ValueError: `norm_type` is not 2 and `unscale_` was not called, or `max_norm` is
                negative.
        """
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"GradScaler.clip_grad_norm_: optimizer is a {type(optimizer).__name__}; call "
                "scaler.clip_grad_norm_(optimizer, max_norm), not with parameters"
            )
        if self._enabled:
            _refuse_own_scaling(optimizer)
            self._check_scale_growth_tracker("clip_grad_norm_")
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is not OptState.UNSCALED:
                grads = _scaled_grads.collect(optimizer)
                if not grads.others:
                    return self._clip_scaled(
                        optimizer, grads, max_norm, norm_type, error_if_nonfinite
                    )
                self.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            _params_of(optimizer), max_norm, norm_type, error_if_nonfinite, foreach
        )
        if self._enabled and norm_type == 2.0 and _step_notes.listeners:
            clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            self._per_optimizer_states[id(optimizer)][_NOTED] = norm, clip
        return norm

    def _clip_scaled(
        self,
        optimizer: torch.optim.Optimizer,
        grads: _scaled_grads.ScaledGrads,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip gradients that are scaled; arguments and result are those of `clip_grad_norm_`."""
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "clip_grad_norm_() is being called after step(). Call it before step(), and "
                "update() at the end of each iteration."
            )
        if _CLIP in state:
            raise RuntimeError(
                "clip_grad_norm_() has already been called on this optimizer since the last "
                "update()."
            )
        if norm_type != 2.0:
            raise ValueError(
                f"GradScaler.clip_grad_norm_: norm_type is {norm_type}; only the l2 norm is "
                "measured while gradients are scaled. Call scaler.unscale_(optimizer) before"
            )
        if not max_norm >= 0.0:
            raise ValueError(
                f"GradScaler.clip_grad_norm_: max_norm is {max_norm}; it must be 0 or more"
            )
        norm = self._measure(optimizer, grads).norm(scale.device) / scale
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"GradScaler.clip_grad_norm_: the norm of the gradients is {norm.item()}, so they "
                "cannot be clipped; with error_if_nonfinite=False the step is skipped"
            )
        wide = any(param.grad.dtype == torch.float64 for param in grads.params())  # type: ignore[union-attr]
        # torch.nn.utils.clip_grad_norm_ adds 1e-6, too.
        clip = torch.clamp((norm + 1e-6) / max_norm, min=1.0).float()
        state[_CLIP] = torch.where(norm.isfinite(), clip, 1.0)  # The step is skipped then.
        state[_CLIPPED] = _C.GradMarks()
        state[_CLIPPED].take(_params_of(optimizer))
        if _step_notes.listeners:
            state[_NOTED] = norm, clip.reciprocal()
        if not _is_fused(optimizer):
            self.unscale_(optimizer)
        return norm if wide else norm.float()

    def _measure(
        self, optimizer: torch.optim.Optimizer, grads: _scaled_grads.ScaledGrads
    ) -> _scaled_grads.Measured:
        measured = _scaled_grads.measure(grads)
        state = self._per_optimizer_states[id(optimizer)]
        state[_MEASURED], state["found_inf_per_device"] = measured, measured.found_inf
        return measured

    # What torch calls in `unscale_` and in `step`.

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        grads = _scaled_grads.collect(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        steps = self._steps.get(optimizer)
        if steps is not None and steps.wants_rows and _MEASURED not in state:
            state[_MEASURED] = _scaled_grads.measure(grads)
        clip = _clip_of(optimizer, state)
        if clip is not None:
            inv_scale = inv_scale / clip
        found = self._unscale_others(grads.others, inv_scale, found_inf)
        return _scaled_grads.join_flags(_scaled_grads.unscale(grads, inv_scale, found))

    def _unscale_others(
        self, params: list[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Have torch unscale gradients that the operators here do not read."""
        if not params:
            return {}
        owner: Any = types.SimpleNamespace(param_groups=[{"params": params}])
        return super()._unscale_grads_(owner, inv_scale, found_inf, True)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        if _CLIP not in state:
            grads = _scaled_grads.collect(optimizer)
            found_inf = self._measure(optimizer, grads).found_inf
            if grads.others:
                one, zero = torch.ones_like(scale), torch.zeros_like(scale)
                for device, found in self._unscale_others(grads.others, one, zero).items():
                    found_inf[device] = torch.maximum(found_inf.get(device, found), found)
            _scaled_grads.join_flags(found_inf)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        found = optimizer_state["found_inf_per_device"].values()
        skipped = bool(sum(each.item() for each in found))
        value = None if skipped else optimizer.step(*args, **kwargs)
        self._steps_of(optimizer).end_step(skipped)
        return value

    # The step.

    @eager
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step an optimizer with unscaled gradients, or skip if one holds inf or NaN.

        Args:
            optimizer: Owner of the gradients.
            args: Passed on to `optimizer.step`.
            kwargs: Likewise.

        Returns:
            What `optimizer.step` returned; None if another than a fused one was skipped.

        Raises:
            AssertionError: No parameter of an optimizer that is not fused has a gradient.
            RuntimeError: It was called before since the last `update`, a closure was given, the
                optimizer scales by itself, or gradients came after `clip_grad_norm_`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        _refuse_own_scaling(optimizer)
        if args and callable(args[0]):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        device_scale.settle(wait=False)
        steps = self._steps_of(optimizer)
        lost = steps.watch_updates()
        with self._announced(optimizer):
            if _is_fused(optimizer):
                value = self._step_fused(optimizer, steps, *args, **kwargs)
            else:
                value = self._step_other(optimizer, *args, **kwargs)
        steps.check_updates(lost)
        return value

    def _announced(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Tell who listens that a step is taken within, and what was measured for it."""
        if not _step_notes.listeners or self._scale is None:
            return contextlib.nullcontext()
        state = self._per_optimizer_states[id(optimizer)]
        if _NOTED in state:
            norm, clip = state[_NOTED]
            _step_notes.measured(self, optimizer, grad_norm=norm, clip=clip)
        unscaled = _FLOATING if state["stage"] is OptState.UNSCALED else ()
        return _step_notes.announced(self, optimizer, scale=self._scale, unscaled=unscaled)

    def _step_fused(
        self, optimizer: Any, steps: ScaledSteps, *args: Any, **kwargs: Any
    ) -> float | None:
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        clip = _clip_of(optimizer, state) if state["stage"] is OptState.READY else None
        if clip is not None:
            optimizer.grad_scale = clip * getattr(optimizer, "grad_scale", 1)
        try:
            value = super().step(optimizer, *args, **kwargs)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # torch removes them after a step only.
                with contextlib.suppress(AttributeError):
                    delattr(optimizer, name)
            raise
        steps.end_fused_step([*state["found_inf_per_device"].values()], state.get(_MEASURED))
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

    def _steps_of(self, optimizer: torch.optim.Optimizer) -> ScaledSteps:
        steps = self._steps.get(optimizer)
        if steps is None:
            steps = self._steps[optimizer] = ScaledSteps(optimizer, self._model, self)
        return steps

    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's last step was skipped, because a gradient held inf or NaN.

        A learning-rate schedule or a moving average of weights follows the steps that were taken:

            if not scaler.step_was_skipped(optimizer): scheduler.step()

        On a GPU the host waits for the step, if the optimizer is fused.

        Raises:
            RuntimeError: This scaler has not stepped the optimizer.
        """
        return self._enabled and self._taken_steps_of(optimizer, "step_was_skipped").was_skipped

    def overflow_report(self, optimizer: torch.optim.Optimizer) -> list[NonFinite]:
        """Return which gradients held how many inf and NaN in an optimizer's last skipped step.

        The worst come first; the list is empty if no step was skipped. On a GPU the host waits,
        and with a fused optimizer there are no counts if gradients were cleared before. If they
        were unscaled by `unscale_` and then cleared, the first overflow in a row names none.

        Raises:
            RuntimeError: This scaler has not stepped the optimizer.
        """
        return self._taken_steps_of(optimizer, "overflow_report").report if self._enabled else []

    def _taken_steps_of(self, optimizer: torch.optim.Optimizer, caller: str) -> ScaledSteps:
        steps = self._steps.get(optimizer)
        if steps is None:
            raise RuntimeError(
                f"GradScaler.{caller}: this {type(optimizer).__name__} was not stepped by "
                "scaler.step(optimizer); if another optimizer is around it, give the inner one"
            )
        return steps

    @property
    def _lowest(self) -> float:
        """The scale below which it does not back off; torch's sinks to 0."""
        return FLOAT32_SMALLEST_NORMAL if self._bounds.min_scale is None else self._bounds.min_scale

    def __getstate__(self) -> dict[str, Any]:
        # Steps and the model belong to objects that are not copied with the scaler.
        return {**super().__getstate__(), "_model": None, "_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._steps = weakref.WeakKeyDictionary()


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _clip_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Tensor | None:
    """Return what scaled gradients are divided by to clip them; None if that was not asked for.

    Raises:
        RuntimeError: They are not the gradients that were measured.
    """
    clip: Tensor | None = state.get(_CLIP)
    if clip is None:
        return None
    if state[_CLIPPED].differ(_params_of(optimizer)):
        raise RuntimeError(
            f"GradScaler: gradients of {type(optimizer).__name__} were written or replaced after "
            "scaler.clip_grad_norm_(optimizer), which has measured them and left them scaled. Call "
            "it after the last backward(); to edit gradients, call scaler.unscale_(optimizer) "
            "before it"
        )
    return clip


def _is_fused(optimizer: Any) -> bool:
    """Whether an optimizer unscales and skips in its own step: ours, torch's with fused=True."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _refuse_own_scaling(optimizer: Any) -> None:
    """Raise the RuntimeError of an optimizer that scales the loss by itself."""
    _is_fused(optimizer)
