"""A step with a closure: the inner optimizer decides how often the loss is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp.grads.nonfinite import Overflow


class StepAbandonedError(Exception):
    """Raised by a closure that overflows at every loss scale, to end the inner optimizer's step."""


class Snapshot:
    """A copy of parameters and optimizer state, restored when a line search is abandoned.

    Args:
        params: Parameters of all groups.
        state: The optimizer's state.
    """

    def __init__(self, params: list[Any], state: Any) -> None:
        self._params = params
        self._values: list[Tensor] = [param.detach().clone() for param in params]
        self._state = [(key, _copy(value)) for key, value in state.items()]

    def restore(self, state: Any) -> None:
        """Write everything back."""
        with torch.no_grad():
            if self._params:
                torch._foreach_copy_(self._params, self._values)
        state.clear()
        state.update(self._state)


def evaluate(
    closure: Callable[[], Any], overflowed: Callable[[], bool], back_off: Callable[[], bool]
) -> Any:
    """Call the closure until its gradients are finite, and return its loss."""
    loss = closure()
    while overflowed():
        if not back_off() or not _is_finite(loss):
            raise StepAbandonedError
        loss = closure()
    return loss


def _is_finite(loss: Any) -> bool:
    return not torch.is_tensor(loss) or bool(loss.detach().isfinite().all())


def _copy(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return copy.copy(value)


class FiniteClosure:
    """A closure that is called again if `scale_loss` finds an overflow in it.

    Args:
        closure: The user's closure.
        take_overflow: Returns the overflow of the present gradients, and clears it.

    Attributes:
        overflow: The overflow of the last call, if calling again could not avoid it.
    """

    def __init__(self, closure: Any, take_overflow: Callable[[], Overflow | None]) -> None:
        self._closure = closure
        self._take_overflow = take_overflow
        self.overflow: Overflow | None = None

    def __call__(self) -> Any:
        return evaluate(self._closure, self._overflowed, self._is_lowered)

    def _overflowed(self) -> bool:
        self.overflow = self._take_overflow()
        return self.overflow is not None

    def _is_lowered(self) -> bool:
        overflow = self.overflow
        return overflow is not None and overflow.scale_after < overflow.scale_before
