"""What became of an optimizer's steps; listeners, such as apex_mp.monitor, are notified of it.

A holder of a loss scale takes a step within `announced`, and calls `StepLog.end` when it knows what
became of the step, in the order of the steps. On a device that the host does not wait for that is
later. Listeners are kept beside their owner, not on it: a copy of an optimizer has none. Without
any listener each call is one test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from apex_mp.core import readback
from apex_mp.core.grads import NonFinite
from apex_mp.core.log import warn

SKIPS_BEFORE_WARNING = 50


@dataclasses.dataclass(frozen=True)
class StepNote:
    """What became of one step.

    Attributes:
        skipped: Whether gradients held inf or NaN, so that nothing was stepped.
        scale: The loss scale of its gradients; None: what `announced` has said.
        lowest: The scale below which it does not back off; None if it never does.
        grad_norm: l2 norm of all unscaled gradients before clipping; None if none was measured.
        scaled_norm: That of scaled ones, if only that is known.
        clip: What the gradients were multiplied by to clip them, the smallest factor if groups have
            their own; None if nothing was measured.
        overflow: Which gradients held inf or NaN.
        optimizer: The one that takes the step, if others share its loss scale; else None.
    """

    skipped: bool
    scale: float | None = None
    lowest: float | None = None
    grad_norm: float | None = None
    scaled_norm: float | None = None
    clip: float | None = None
    overflow: Sequence[NonFinite] = ()
    optimizer: Any = None


class Listener(Protocol):
    """Hears of the steps of one owner."""

    def before_step(
        self,
        scale: float | Tensor,
        unscaled: Collection[torch.dtype],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """The gradients of a step are complete; see `announced`."""

    def note(self, *, grad_norm: float | Tensor | None, clip: float | Tensor | None) -> None:
        """Something was measured for the next step."""

    def after_step(self, note: StepNote) -> None:
        """A step has ended, or was skipped."""

    def withdraw_step(self) -> None:
        """The step that was announced last has raised an error; there may be no `after_step`."""


# By the optimizer or scaler that they listen to, which they do not keep alive.
listeners: weakref.WeakKeyDictionary[Any, list[Listener]] = weakref.WeakKeyDictionary()


def listen(owner: Any, listener: Listener) -> None:
    """Notify a listener of an owner's steps; the owner is not kept alive."""
    listeners.setdefault(owner, []).append(listener)


def unlisten(listener: Listener) -> None:
    """Take a listener away from all owners."""
    for owner, each in [*listeners.items()]:
        rest = [other for other in each if other is not listener]
        if rest:
            listeners[owner] = rest
        else:
            del listeners[owner]


def heard(*owners: Any) -> list[Listener]:
    """Return the listeners of the owners, each once; None stands for no owner."""
    if not listeners:
        return []
    found = [each for owner in owners if owner is not None for each in listeners.get(owner, ())]
    return [*{id(each): each for each in found}.values()]


@contextlib.contextmanager
def announced(
    *owners: Any,
    scale: float | Tensor,
    unscaled: Collection[torch.dtype] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[None]:
    """Notify listeners that gradients are complete and the step is taken within, or raises.

    Args:
        owners: Whose step it is.
        scale: Their loss scale: a number, or one on a device.
        unscaled: Dtypes of gradients that it was taken out of already.
        optimizer: The one whose gradients `scale` and `unscaled` describe [None: all].
    """
    for listener in heard(*owners):
        listener.before_step(scale, unscaled, optimizer)
    try:
        yield
    except BaseException:
        for listener in heard(*owners):
            listener.withdraw_step()
        raise


def measured(
    *owners: Any,
    grad_norm: float | Tensor | None = None,
    clip: float | Tensor | None = None,
) -> None:
    """Notify listeners of what was measured for the next step; call it before `announced`."""
    for listener in heard(*owners):
        listener.note(grad_norm=grad_norm, clip=clip)


class StepLog:
    """What became of the steps of one optimizer: for its user, schedulers and listeners.

    Args:
        optimizer: The optimizer that schedulers watch; known weakly.
        who: What the warning of endless skips begins with.

    Attributes:
        report: Which gradients held inf or NaN in the last skipped step, as far as the host knows.
        skips_in_a_row: How many of the last steps were skipped, as far as the host knows.
        captured: Not 0 if the last step was skipped that a CUDA graph took, which the host does not
            hear of; None: the last step was no such step.
    """

    def __init__(self, optimizer: Any, who: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._who = who
        self.report: Sequence[NonFinite] = ()
        self.skips_in_a_row = 0
        self.captured: Tensor | None = None

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped; the host waits until it knows."""
        readback.wait()
        return self.skips_in_a_row > 0 if self.captured is None else bool(self.captured)

    def end(
        self,
        skipped: bool,
        report: Sequence[NonFinite],
        *,
        scale: Callable[[], float],
        owners: Sequence[Any],
        note: Callable[[], StepNote],
    ) -> None:
        """Record the outcome of a step; steps end in the order in which they were taken.

        Args:
            skipped: Whether it was skipped.
            report: Which gradients held inf or NaN.
            scale: Returns the loss scale of the next step, for the warning.
            owners: Whose listeners are notified. They may raise: finish the step before. All are
                notified; then the first error is raised.
            note: Returns what they are notified of; called if there are any.
        """
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if skipped:
            self.report = report
            _mark_step_called(self._optimizer())
        if self.skips_in_a_row == SKIPS_BEFORE_WARNING:
            worst = f" The worst: {report[0]}." if report else ""
            warn(
                f"{self._who} has skipped {SKIPS_BEFORE_WARNING} steps in a row; the loss scale is "
                f"now {scale()}. Gradients hold inf or NaN at every scale tried.{worst}",
                "every-step-is-skipped",
            )
        notified = heard(*owners)
        if notified:
            _notify(notified, note())


def _mark_step_called(optimizer: Any) -> None:
    """Keep schedulers from warning that `step` was never called on an optimizer that skipped one.

    Or on one inside it, which is an attribute of it: a scheduler may watch either.
    """
    for each in (optimizer, *getattr(optimizer, "__dict__", {}).values()):
        if isinstance(each, torch.optim.Optimizer) and hasattr(each.step, "_wrapped_by_lr_sched"):
            each._opt_called = True  # type: ignore[attr-defined]


def _notify(notified: Sequence[Listener], note: StepNote) -> None:
    errors = []
    for listener in notified:
        try:
            listener.after_step(note)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def norm_and_clip(
    norms: Sequence[float], groups: Sequence[Mapping[str, Any]], *, by_global_norm: bool
) -> tuple[float | None, float | None]:
    """Return the norm of all gradients, and the smallest factor that clipping multiplies by.

    Args:
        norms: l2 norm of each group's unscaled gradients; empty if none was measured.
        groups: The groups; those with a `max_grad_norm` above 0 are clipped.
        by_global_norm: Each is clipped by the norm of all.
    """
    if not norms:
        return None, None
    total = math.hypot(*norms)
    if not math.isfinite(total):
        return None, None
    factors = [
        clip_factor(total if by_global_norm else norm, group["max_grad_norm"])
        for norm, group in zip(norms, groups, strict=True)
        if group.get("max_grad_norm", 0.0) > 0.0
    ]
    return total, min(factors, default=None)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients are multiplied by: 1 / `clip_divisor` of csrc/math/clip.h."""
    return min(1.0, max_norm / (norm + 1e-6))
