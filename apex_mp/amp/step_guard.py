"""Skips one step of an optimizer after an overflow, whoever calls it and with whatever closure."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from apex_mp.fp16_utils._closure import Snapshot, StepAbandonedError, evaluate
from apex_mp.grads import NonFinite


class Skips:
    """What is known of the next step of an optimizer, and of its last one.

    Attributes:
        skip_next: Whether the gradients that are there overflowed.
        step_was_skipped: Whether the last step was skipped.
        scaled_by: The loss scale of gradients that were left scaled (`delay_unscale`), or None.
        report: For the last skipped step, which gradients held how many inf and NaN.
    """

    def __init__(self) -> None:
        self.skip_next = False
        self.step_was_skipped = False
        self.scaled_by: float | None = None
        self.report: list[NonFinite] = []
        self._can_back_off: Callable[[], bool] = lambda: False

    def overflowed(self, report: Sequence[NonFinite], can_back_off: Callable[[], bool]) -> None:
        """Skip the next step; however many losses overflow, it is one."""
        self.report = [*self.report, *report] if self.skip_next else [*report]
        self.skip_next = True
        self._can_back_off = can_back_off

    def take_skip(self) -> bool:
        """Return whether this step is to be skipped; the next one then is not."""
        skip, self.skip_next = self.skip_next, False
        self.step_was_skipped = skip
        return skip

    def refuse_scaled_gradients(self, optimizer: Any) -> None:
        """Raise a RuntimeError if a step would use gradients that are still scaled."""
        if self.scaled_by is None:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(param.grad is not None for param in params):
            raise RuntimeError(
                f"step() was called with gradients that are still scaled by {self.scaled_by}: the "
                "last scale_loss had delay_unscale=True; before a step the last one must not"
            )
        self.scaled_by = None


class StepGuard(Skips):
    """Stands before the `step` of one optimizer, from its first `scale_loss` on.

    It is put there once, as a method of the object, so that schedulers made before and after find
    what they look for, and does nothing until an overflow.

    Args:
        optimizer: A torch optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)
        self._had_own_step = "step" in vars(optimizer)
        self._before = optimizer.step
        optimizer.step = types.MethodType(self._guarded(_function_of(optimizer.step)), optimizer)
        self._ours = optimizer.step

    def remove(self) -> None:
        """Put back the `step` that was there, unless somebody has put another one on ours."""
        self.skip_next, self.scaled_by = False, None
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("step") is not self._ours:
            return
        if self._had_own_step:
            optimizer.step = self._before
        else:
            del optimizer.step

    def _guarded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def guarded_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.refuse_scaled_gradients(optimizer)
            if self.take_skip():
                optimizer._opt_called = True  # Else schedulers warn of a step that never came.
                return None
            closure = args[0] if args else kwargs.pop("closure", None)
            if closure is None:
                return step(optimizer, *args, **kwargs)
            return self._step_with_closure(step, optimizer, closure, *args[1:], **kwargs)

        return guarded_step

    def _step_with_closure(
        self, step: Callable[..., Any], optimizer: Any, closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Step with a closure in which `scale_loss` may find an overflow."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        before = Snapshot(params, optimizer.state)

        def finite_closure() -> Any:
            return evaluate(closure, self.take_skip, lambda: self._can_back_off())

        try:
            return step(optimizer, finite_closure, *args, **kwargs)
        except StepAbandonedError:
            before.restore(optimizer.state)
            self.step_was_skipped = True
            return None


def guard_of(optimizer: Any) -> StepGuard:
    """Return the guard of an optimizer; it gets one if it has none."""
    guard = vars(optimizer).get("_amp_step_guard")
    if not isinstance(guard, StepGuard):
        guard = optimizer._amp_step_guard = StepGuard(optimizer)
    return guard


def remove_guard(optimizer: Any) -> None:
    """Take the guard of an optimizer away."""
    guard = vars(optimizer).pop("_amp_step_guard", None)
    if guard is not None:
        guard.remove()


def _function_of(step: Any) -> Callable[..., Any]:
    """`step` as a function of the optimizer: schedulers replace the method by a plain function."""
    function = getattr(step, "__func__", None)
    if function is not None:
        return function  # type: ignore[no-any-return]

    @functools.wraps(step)
    def ignoring_self(_: Any, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return ignoring_self
