"""What is known of an overflow, and what a closure does about one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from apex_mp.fp16_utils._closure import evaluate
from apex_mp.fp16_utils._skips import lines
from apex_mp.grads import NonFinite


@dataclasses.dataclass(frozen=True)
class Overflow:
    """Gradients that hold inf or NaN.

    Attributes:
        report: Which gradients hold how many.
        scale_before: The loss scale that they had.
        scale_after: The next one.
    """

    report: Sequence[NonFinite]
    scale_before: float
    scale_after: float

    def lines(self) -> list[str]:
        """Return a line for each of the worst parameters, and one for the number of the others."""
        return lines(self.report)


class FiniteClosure:
    """A closure in which `scale_loss` may find an overflow: then it is called again.

    Args:
        closure: The user's.
        take_overflow: Returns the overflow of the gradients that are there, once.

    Attributes:
        overflow: That of the last call, if it could not be helped.
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
