"""Skip one step of an optimizer after an overflow, for any caller and with any closure."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp._scale_loss.loss_grads import found_in, slots_of
from apex_mp.amp._stages import Event, Stage, following
from apex_mp.core import readback
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.grads.nonfinite import Overflow
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.scale.amp_scaler import LossScaler
from apex_mp.step import step_log
from apex_mp.step.closure import FiniteClosure, Snapshot, StepAbandonedError
from apex_mp.step.record import StepRecord
from apex_mp.step.scaled_step import HostOutcome, ScaledStep, StepResult, handing, takes_scaled_step

_WIDE = (torch.float32, torch.float64)


@dataclasses.dataclass
class Block:
    """A block of `scale_loss`, which all its optimizers share.

    Attributes:
        is_open: Whether it has not ended.
    """

    is_open: bool = True


class StepGuard:
    """Wraps the `step` of one optimizer, from its first `scale_loss` on.

    The wrapper is set once, as a method of the object, so that schedulers made before and after
    that can wrap it themselves. It only calls `step` until there is an overflow.

    Args:
        optimizer: An optimizer of any class.

    Attributes:
        last_overflow: The last overflow that the host knows of.
        scaled_by: The loss scale of gradients that were left scaled (`delay_unscale`), or None.
        scalers: The scalers of the losses that gave those gradients, by id().
        block: Returns the last block of `scale_loss`, or None if that was left by an exception.
        scaler: The loss scale of the last loss, once its block has ended.
        scale: The value of `scaler` in that block: a number, or a tensor on a device.
    """

    def __init__(self, optimizer: Any) -> None:
        self.last_overflow: Overflow | None = None
        self.scaled_by: float | None = None
        self.scalers: dict[int, LossScaler] = {}
        self.block: Callable[[], Block | None] = lambda: None
        self.scaler: LossScaler | None = None
        self.scale: float | Tensor = 1.0
        # The overflow of the present gradients; a flag on a device, if the host does not know.
        self._overflow: Overflow | None = None
        self._found_inf: Tensor | None = None
        # One of the two, if the next step is to check its gradients.
        self._suspect: Overflow | Tensor | None = None
        self._record = StepRecord(optimizer, f"amp: {type(optimizer).__name__}")
        self._is_leaving = False
        self._optimizer = weakref.ref(optimizer)
        self._had_own_step = "step" in vars(optimizer)
        self._before = optimizer.step
        self._step = _function_of(optimizer)
        self._ours = optimizer.step = types.MethodType(self._guarded_step(), optimizer)
        _guards.add(self)

    def __reduce__(self) -> Any:
        return type(None), ()  # A copy of the optimizer gets a guard of its own.

    def overflowed(self, overflow: Overflow) -> None:
        """Skip the next step: one step, however many losses overflow."""
        self._overflow = self.last_overflow = overflow

    def may_have_overflowed(self, found_inf: Tensor) -> None:
        """Skip the next step if `found_inf` is 1; the host does not wait for it."""
        before = self._found_inf
        self._found_inf = found_inf if before is None else torch.maximum(before, found_inf)

    def begin_block(self, optimizer: Any) -> None:
        """Let the next step check its gradients if those that overflowed were cleared without one.

        They may be gone, or set aside to be put back.
        """
        if self._overflow is not None:
            if not found_in(slots_of(optimizer), self.scale):
                self._suspect, self._overflow = self._overflow, None
        elif self._found_inf is not None:
            pairs = slots_of(optimizer).pairs()
            if all(source.grad is None and param.grad is None for source, param in pairs):
                self._suspect, self._found_inf = self._found_inf, None

    def _resolve_suspect(self, optimizer: Any) -> None:
        """Check gradients for an overflow whose own gradients were cleared, or set aside."""
        suspect, self._suspect = self._suspect, None
        if suspect is None:
            return
        found = found_in(slots_of(optimizer), self.scale)
        if isinstance(suspect, Tensor):
            self.may_have_overflowed(torch.minimum(suspect, found.on(suspect.device)))
        elif found:
            self._overflow = suspect

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; the host waits until it knows."""
        return self._record.was_skipped

    @property
    def in_block(self) -> bool:
        """Whether a block of `scale_loss` is open."""
        block = self.block()
        return block is not None and block.is_open

    def check(self, event: Event) -> None:
        """Raise the RuntimeError of the table, if it refuses an event."""
        stage = Stage.READY if self.scaled_by is None else Stage.LEFT_SCALED
        following(Stage.IN_BLOCK if self.in_block else stage, event, scale=self.scaled_by)

    # Setting and removing the wrapper.

    def stay(self) -> None:
        """Cancel a `leave` that is still pending."""
        self._is_leaving = False

    def leave(self) -> None:
        """Restore the original `step`; if the next step must be skipped or refused, after that."""
        self._is_leaving = True
        pending = (self._overflow, self._found_inf, self._suspect, self.scaled_by)
        if all(each is None for each in pending):
            self._take_off()

    def _take_off(self) -> None:
        _guards.discard(self)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        del optimizer._amp_step_guard
        if vars(optimizer).get("step") is not self._ours:
            return  # Another `step` wraps ours, which does nothing from now on.
        if self._had_own_step:
            optimizer.step = self._before
        else:
            del optimizer.step

    # The step.

    def _guarded_step(self) -> Callable[..., Any]:
        @functools.wraps(self._step)
        def guarded_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if vars(optimizer).get("_amp_step_guard") is not self:  # A copy, or we have left.
                return self._step(optimizer, *args, **kwargs)
            return self._take_step(optimizer, args, kwargs)

        return guarded_step

    def _take_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_scaled = self.scaled_by is not None and not self.in_block
        if is_scaled and not slots_of(optimizer).read().rows():  # They were cleared.
            self.scaled_by = None
            self.scalers.clear()
        self.check(Event.PLAIN_STEP)
        self._resolve_suspect(optimizer)
        if self._is_leaving:
            self._take_off()
        if not step_log.listeners or args or kwargs:  # A closure has yet to make gradients.
            return self._step_or_skip(optimizer, args, kwargs)
        # Gradients of parameters that have masters stay scaled.
        has_masters = getattr(optimizer, "_amp_masters", None) is not None
        unscaled = _WIDE if has_masters else (*_WIDE, *LOW_PRECISION)
        with step_log.announced(optimizer, self.scaler, scale=self.scale, unscaled=unscaled):
            return self._step_or_skip(optimizer, args, kwargs)

    def _step_or_skip(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._found_inf is not None and self._overflow is None and not (args or kwargs):
            return self._step_on_device(optimizer)
        overflow = self._take_overflow()
        if overflow is not None:
            slots = slots_of(optimizer)
            for row in slots.with_master:  # The user may clear only the model's gradients.
                slots.params[row].grad = None
            self._end_step(overflow)
            return None
        if args and callable(args[0]):
            return self._step_with_closure(
                args[0], lambda closure: self._step(optimizer, closure, *args[1:], **kwargs)
            )
        if callable(kwargs.get("closure")):
            return self._step_with_closure(
                kwargs["closure"],
                lambda closure: self._step(optimizer, *args, **{**kwargs, "closure": closure}),
            )
        value = self._step(optimizer, *args, **kwargs)
        self._end_step(None)
        return value

    def _take_overflow(self) -> Overflow | None:
        found_inf, self._found_inf = self._found_inf, None
        readback.wait()  # Results of earlier steps are handled first.
        if found_inf is not None and found_inf.item():
            self._overflow = self.last_overflow
        overflow, self._overflow = self._overflow, None
        return overflow

    def _step_on_device(self, optimizer: Any) -> Any:
        """Leave it to the optimizer's step to look at the flag; the host does not wait for it."""
        found_inf, self._found_inf = self._found_inf, None
        assert found_inf is not None
        result = StepResult.of_flag(found_inf)
        try:
            if takes_scaled_step(optimizer):
                step = ScaledStep(found_inf=found_inf, warns=True)
                with handing(optimizer, step):
                    value = self._step(optimizer)
            else:
                optimizer.found_inf = found_inf  # As torch.amp.GradScaler does.
                try:
                    value = self._step(optimizer)
                finally:
                    del optimizer.found_inf
        except BaseException:
            self.may_have_overflowed(found_inf)  # These gradients are there still.
            raise
        scaler = self.scaler
        self._record.submit(
            result,
            lambda outcome: self._finish(
                self.last_overflow if outcome.found_inf else None, scaler, None
            ),
        )
        readback.poll()
        return value

    def _end_step(self, overflow: Overflow | None) -> None:
        """Record a step whose outcome the host knows; `overflow` is why it was skipped, or None."""
        self._record.submit(
            StepResult(HostOutcome(overflow is not None)),
            lambda _: self._finish(overflow, self.scaler, self.scale),
        )

    def _finish(
        self, overflow: Overflow | None, scaler: LossScaler | None, scale: float | Tensor | None
    ) -> None:
        """Record the outcome of a step."""
        skipped = overflow is not None
        before = scale if overflow is None else overflow.scale_before
        report = () if overflow is None else overflow.report
        optimizer = self._optimizer()

        def note() -> step_log.StepNote:
            return step_log.StepNote(
                skipped,
                None if before is None else float(before),
                lowest=None if scaler is None else scaler.lowest,
                overflow=report,
                optimizer=optimizer,
            )

        self._record.end(
            skipped,
            report,
            scale=lambda: math.nan if overflow is None else overflow.scale_after,
            attempted=lambda: math.nan if overflow is None else overflow.scale_before,
            owners=[optimizer, scaler],
            note=note,
        )

    def _step_with_closure(self, closure: Any, step: Callable[[Callable[[], Any]], Any]) -> Any:
        optimizer = self._optimizer()
        state = getattr(optimizer, "state", {})
        before = Snapshot(_written_by(optimizer), state)
        finite = FiniteClosure(closure, self._take_overflow)
        try:
            value = step(finite)
        except StepAbandonedError:
            before.restore(state)
            value = None
        self._end_step(finite.overflow)
        return value


def guard_first_closure(
    optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Guard an optimizer that scales its first loss in a closure; a hook before every step."""
    has_guard = isinstance(vars(optimizer).get("_amp_step_guard"), StepGuard)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if has_guard or not callable(closure):
        return None
    before = Snapshot(_written_by(optimizer), optimizer.state)
    finite = FiniteClosure(closure, guard_of(optimizer)._take_overflow)

    @functools.wraps(closure)
    def first_closure() -> Any:
        try:
            return finite()
        except StepAbandonedError:
            before.restore(optimizer.state)
            raise RuntimeError(  # The guard, which could end the step, is not around this one yet.
                "the gradients of a closure hold inf or NaN, and the loss scale cannot be lowered; "
                "the step was undone"
            ) from None

    if len(args) > 1:
        return (args[0], first_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": first_closure}


# The guards that wrap a step now.
_guards: weakref.WeakSet[StepGuard] = weakref.WeakSet()


def guard_of(optimizer: Any) -> StepGuard:
    """Return the guard of an optimizer; one is made if it has none."""
    guard = vars(optimizer).get("_amp_step_guard")
    if not isinstance(guard, StepGuard):
        guard = optimizer._amp_step_guard = StepGuard(optimizer)
    guard.stay()
    return guard


def remove_guards() -> None:
    """Remove the guards of all optimizers; one that must skip a step is removed after that."""
    for guard in [*_guards]:
        guard.leave()


def step_was_skipped(optimizer: Any) -> bool:
    """Return whether an optimizer's last step was skipped, because gradients held inf or NaN.

    Args:
        optimizer: Any optimizer, one that `wrap_optimizer` returned or an FP16_Optimizer; False
            for one whose loss was never scaled.

    Raises:
        TypeError: It is not an optimizer.
    """
    if isinstance(optimizer, FP16_Optimizer):
        return optimizer._record.was_skipped
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"step_was_skipped: optimizer is a {type(optimizer).__name__}; it must be an optimizer"
        )
    guard = getattr(optimizer, "_amp_step_guard", None)  # A wrapper has that of the one inside.
    return isinstance(guard, StepGuard) and guard.step_was_skipped


def _function_of(optimizer: Any) -> Callable[..., Any]:
    """`optimizer.step` as a function of the optimizer."""
    step = optimizer.step
    if getattr(step, "__self__", None) is optimizer:
        return step.__func__  # type: ignore[no-any-return]

    # Schedulers replace the method by a plain function.
    @functools.wraps(step)
    def ignoring_self(_: Any, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return ignoring_self


def _written_by(optimizer: Any) -> list[torch.Tensor]:
    """Return what a step writes: parameters, and the model's parameters that have masters."""
    slots = slots_of(optimizer)
    return [*{id(param): param for param in (*slots.params, *slots.sources)}.values()]
