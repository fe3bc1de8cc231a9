"""torch's GradScaler, which also unscales, measures and clips float16 gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from apex_mp.amp.grad_scaling.folded_clip import FoldedClip, params_of
from apex_mp.amp.grad_scaling.mixed_grads import UnscaledGrads, WaitingGrads
from apex_mp.amp.grad_scaling.scale_bounds import BoundedGradScaler, eager
from apex_mp.amp.grad_scaling.scaled_steps import ScaledSteps
from apex_mp.amp.grad_scaling.torch_fused import is_fused
from apex_mp.core import tensors
from apex_mp.core.grads import measured as _measured
from apex_mp.core.grads.found_inf import FoundInf
from apex_mp.core.grads.grad_slots import Grads, GradSlots
from apex_mp.core.grads.marks import is_mark, refuse_offloaded
from apex_mp.core.masters.masters import LOW_PRECISION
from apex_mp.core.step import readback, step_log
from apex_mp.core.step.scaled_step import ScaledStep, takes_scaled_step
from apex_mp.optimizers._legacy_call import unscaled_dtypes

# Keys that we add to torch's state of an optimizer, which update() drops.
MEASURED = "apex_mp_measured"  # what the last pass over the gradients has found
NOTED = "apex_mp_noted"  # norm and clip factor, for listeners of the step
UNSCALED = "apex_mp_unscaled"  # the `UnscaledGrads`
_CLIPPED = "apex_mp_clipped"  # that `clip_grad_norm_` has measured scaled gradients


class UnscalingGradScaler(BoundedGradScaler):
    """The part of GradScaler between `backward` and the step: unscaling and clipping.

    Args:
        arguments: Those of `BoundedGradScaler`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # By optimizer; it is not kept alive.
        self._steps: weakref.WeakKeyDictionary[Any, ScaledSteps] = weakref.WeakKeyDictionary()
        # By optimizer: the clips that no step has applied yet.
        self._clips: weakref.WeakKeyDictionary[Any, FoldedClip] = weakref.WeakKeyDictionary()
        # By optimizer: the gradients that it has not stepped with though `update` was called.
        self._waiting: weakref.WeakKeyDictionary[Any, WaitingGrads] = weakref.WeakKeyDictionary()

    @eager
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
            refuse_no_optimizer("unscale_", optimizer)
            refuse_own_scaling(optimizer)
            refuse_offloaded("unscale_", optimizer)
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
        if self._enabled:
            refuse_own_scaling(optimizer)
            self._check_scale_growth_tracker("clip_grad_norm_")
            if optimizer in self._clips and self._clips[optimizer].is_replayed:
                self._clips.pop(optimizer).close()
            self._clip_of(optimizer)
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is not OptState.UNSCALED:
                is_ours = takes_scaled_step(optimizer)
                grads = None if is_ours else GradSlots(optimizer.param_groups).read()
                if grads is None or not grads.others:
                    return self._clip_scaled(
                        optimizer, grads, max_norm, norm_type, error_if_nonfinite
                    )
                self.unscale_(optimizer)
            self._refuse_mixed(optimizer, "clip_grad_norm_")
        norm = torch.nn.utils.clip_grad_norm_(
            params_of(optimizer), max_norm, norm_type, error_if_nonfinite, foreach
        )
        norm = tensors.whole(norm)
        if self._enabled and norm_type == 2.0 and step_log.listeners:
            clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            self._per_optimizer_states[id(optimizer)][NOTED] = norm, clip
        return norm

    def _clip_scaled(
        self,
        optimizer: torch.optim.Optimizer,
        grads: Grads | None,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip gradients that are scaled; arguments and result are those of `clip_grad_norm_`.

        `grads` is None for a fused optimizer of this package, which measures them itself.
        """
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "clip_grad_norm_() is being called after step(). Call it before step(), and "
                "update() at the end of each iteration."
            )
        if _CLIPPED in state:
            raise RuntimeError(
                "clip_grad_norm_() has already been called on this optimizer since the last "
                "update(). Call scaler.update() at the end of each iteration, also if the step is "
                "left out."
            )
        if norm_type != 2.0:
            raise ValueError(
                f"GradScaler.clip_grad_norm_: norm_type is {norm_type}; only the l2 norm is "
                "measured while gradients are scaled. Call scaler.unscale_(optimizer) before"
            )
        found_inf = checked = None
        if grads is None:
            checked = self._scaled_step(optimizer, max_norm)
            norm, found_inf, is_wide = self._check_scaled(optimizer, checked)
        else:
            norm = self._measure(optimizer, grads).norm(scale.device) / scale
            is_wide = torch.float64 in grads.dtypes()
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"GradScaler.clip_grad_norm_: the norm of the gradients is {norm.item()}, so they "
                "cannot be clipped; with error_if_nonfinite=False the step is skipped"
            )
        state[_CLIPPED] = True
        clip = self._clips[optimizer] = FoldedClip(optimizer, norm, max_norm, found_inf)
        # A plan knows the scale by its address, which another tensor must not get.
        clip.scale = None if checked is None else checked.scale
        clip.guard(optimizer)
        if step_log.listeners:
            state[NOTED] = norm, clip.divisor.reciprocal()
        if not (takes_scaled_step(optimizer) or is_fused(optimizer)):
            self.unscale_(optimizer)
        return norm.clone() if is_wide else norm.float()

    def _check_scaled(self, optimizer: Any, step: ScaledStep) -> tuple[Tensor, Tensor, bool]:
        """Check gradients for a step that clips them.

        Returns:
            Their norm, unscaled, and found_inf, which are valid until the step; and whether one of
            them is float64.
        """
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        found = optimizer.check_gradients(step)
        self._note_dtypes(found.dtypes)
        if found.dtypes:
            self._note_flag(optimizer, found.found_inf)
        norm = tensors.copy_async(found.norm, scale.device)
        return norm, found.found_inf, torch.float64 in found.dtypes

    def _note_flag(self, optimizer: Any, flag: Tensor) -> None:
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {flag.device: flag}

    def _scaled_step(self, optimizer: Any, clip_to: float | None) -> ScaledStep:
        """Return the step of a fused optimizer of this package with scaled gradients."""
        scale, _ = self._check_scale_growth_tracker("step")
        more = vars(optimizer).get("grad_scale")  # The user's own, as torch allows.
        return ScaledStep(
            scale=scale if more is None else scale * more,
            check=True,
            clip_to=clip_to,
            unscale=unscaled_dtypes(optimizer),
            wait=False,
        )

    def _measure(self, optimizer: torch.optim.Optimizer, grads: Grads) -> _measured.Measured:
        scale, _ = self._check_scale_growth_tracker("_measure")
        self._note_dtypes(grads.dtypes())
        measured = _measured.measure(grads, scale)
        state = self._per_optimizer_states[id(optimizer)]
        state[MEASURED], state["found_inf_per_device"] = measured, measured.found.flags
        return measured

    def _refuse_mixed(self, optimizer: torch.optim.Optimizer, caller: str) -> None:
        """Raise a RuntimeError if scaled gradients were added to unscaled ones."""
        unscaled = self._per_optimizer_states.get(id(optimizer), {}).get(UNSCALED)
        if unscaled is not None:
            unscaled.check(caller, type(optimizer).__name__)

    def _watch_unscaled(self, output: Tensor) -> None:
        """Notice a backward from a scaled output to gradients that are unscaled already."""
        if output.requires_grad:
            reference = weakref.ref(self)
            output.register_hook(lambda _: _begin_backward(reference()))  # type: ignore[no-untyped-call]

    def _note_waiting(self) -> None:
        """Called at the begin of `update`: note gradients that no step has used."""
        if self._scale is None or readback.is_capturing():
            return
        for optimizer in self._steps:
            params = params_of(optimizer)
            state = self._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})
            is_stepped = state["stage"] is not OptState.READY
            if is_stepped or all(param.grad is None for param in params):
                self._waiting.pop(optimizer, None)
            elif optimizer not in self._waiting or not self._waiting[optimizer].are_kept:
                self._waiting[optimizer] = WaitingGrads(params, self._scale)

    def _note_dtypes(self, dtypes: Collection[torch.dtype]) -> None:
        is_narrow = not {*dtypes}.isdisjoint(LOW_PRECISION)
        self._has_16_bit_grads = self._has_16_bit_grads or is_narrow

    # Methods that torch calls in `unscale_` and in `step`.

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
        with self._applying_clip(optimizer) as clip:
            if clip is not None:
                inv_scale = inv_scale / clip.divisor
            found = FoundInf()
            _unscale_others(found, grads.other_params(), inv_scale)
            measured = _measured.unscale(grads, inv_scale, found, scale, sums=fused)
        self._per_optimizer_states[id(optimizer)][UNSCALED] = UnscaledGrads(grads.slots.params)
        if fused:
            self._per_optimizer_states[id(optimizer)][MEASURED] = measured
        return found.join(scale.device)

    @contextlib.contextmanager
    def _applying_clip(self, optimizer: torch.optim.Optimizer) -> Iterator[FoldedClip | None]:
        """Yield the clip that this step applies; None if there is none.

        Raises:
            RuntimeError: Gradients have changed since the clip, or `update` was called.
        """
        clip = self._clip_of(optimizer)
        if clip is None:
            yield None
            return
        with clip.stepping():
            yield clip
        del self._clips[optimizer]

    def _clip_of(self, optimizer: torch.optim.Optimizer) -> FoldedClip | None:
        """Return the clip that an optimizer's next step applies, or None."""
        clip = self._clips.get(optimizer)
        if clip is None:
            return None
        if clip.is_obsolete(optimizer):
            self._clips.pop(optimizer).close()
            return None
        clip.check(optimizer)
        return clip

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        if _CLIPPED not in state:
            grads = GradSlots(optimizer.param_groups).read()
            found = self._measure(optimizer, grads).found
            _unscale_others(found, grads.other_params(), 1.0)
            found.join(scale.device)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]


def _begin_backward(scaler: UnscalingGradScaler | None) -> None:
    if scaler is None:
        return
    for state in scaler._per_optimizer_states.values():
        if UNSCALED in state and state["stage"] is OptState.UNSCALED:
            state[UNSCALED].watch_backward()
    for waiting in scaler._waiting.values():
        waiting.watch_backward()


@torch.no_grad()
def _unscale_others(found: FoundInf, params: list[Tensor], inv_scale: float | Tensor) -> None:
    """Multiply gradients that `GradSlots` lists as others by `inv_scale`, and check them."""
    # By id; parameters may share a gradient, which is to be unscaled once.
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for param in params:
        grad = param.grad
        assert grad is not None  # `params` have gradients.
        if is_mark(grad):
            continue
        _, changed = known.setdefault(id(grad), (grad, _resolved(grad)))
        if changed is not grad:
            param.grad = changed
    found.unscale_others([grad for _, grad in known.values()], inv_scale)


def _resolved(grad: Tensor) -> Tensor:
    """Return a gradient in a form that can be checked and clipped in place; often it is its own."""
    if grad.is_sparse:
        # The sum of an index's values may overflow in float16.
        return grad.coalesce() if grad.dtype == torch.float16 else grad
    # torch.nn.utils.clip_grad_norm_ refuses lazy conjugates.
    return grad.resolve_conj().resolve_neg() if grad.layout is torch.strided else grad


def refuse_no_optimizer(caller: str, optimizer: Any) -> None:
    """Raise a TypeError if `optimizer` is not an optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"GradScaler.{caller}: optimizer is a {type(optimizer).__name__}; it must be an "
            "optimizer, which has param_groups"
        )


def refuse_own_scaling(optimizer: Any) -> None:
    """Let an optimizer that scales the loss by itself raise its RuntimeError.

    `FP16_Optimizer` and `OptimWrapper` raise it when `_step_supports_amp_scaling` is read.
    """
    is_fused(optimizer)


def refuse_step_of_another(optimizer: Any) -> None:
    """Raise a TypeError if `optimizer.step` is that of a fused optimizer inside.

    That one would step with scaled gradients: what is set on the optimizer outside it does not see.
    """
    inner = getattr(optimizer.step, "__self__", optimizer)
    if inner is not optimizer and is_fused(inner):
        raise TypeError(
            f"GradScaler.step: the step of this {type(optimizer).__name__} is that of the "
            f"{type(inner).__name__} inside; give the scaler that one"
        )
