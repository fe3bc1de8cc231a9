"""A closure that is called again after an overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apex_mp.core.step.closure import evaluate
from apex_mp.core.step.overflow import Overflow


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
