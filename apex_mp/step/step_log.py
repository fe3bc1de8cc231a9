"""Outcomes of an optimizer's steps, of which listeners such as apex_mp.monitor are notified.

The owner of a loss scale takes a step within `announced`, and calls `StepRecord.end` once it knows
the outcome, in the order of the steps: later, if the host does not wait for the device. Listeners
are kept in a dict beside their owner, so that a copy of an optimizer has none. Without them each
call costs one test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from apex_mp.grads.found_inf import clip_factor
from apex_mp.grads.nonfinite import NonFinite


@dataclasses.dataclass(frozen=True)
class StepNote:
    """The outcome of one step, for listeners.

    Attributes:
        skipped: Whether gradients held inf or NaN, so that nothing was stepped.
        scale: The loss scale of the gradients; None: that given to `announced`.
        lowest: The smallest scale that the loss scale backs off to; None if it never backs off.
        grad_norm: l2 norm of all unscaled gradients before clipping; None if none was measured.
        scaled_norm: The same of scaled gradients, if only that is known.
        clip: The factor by which clipping multiplied the gradients, the smallest if each group has
            its own; None if nothing was measured.
        overflow: Which gradients held inf or NaN.
        optimizer: The optimizer that takes the step, if others share its loss scale; else None.
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
    """Is notified of the steps of one owner."""

    def before_step(
        self,
        scale: float | Tensor,
        unscaled: Collection[torch.dtype],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Called when the gradients of a step are complete; see `announced`."""

    def note(self, *, grad_norm: float | Tensor | None, clip: float | Tensor | None) -> None:
        """Called with what was measured for the next step."""

    def after_step(self, note: StepNote) -> None:
        """Called when the outcome of a step is known."""

    def withdraw_step(self) -> None:
        """Called when the last announced step raises an error; there may be no `after_step`."""


# By the optimizer or scaler that they listen to; that is not kept alive.
listeners: weakref.WeakKeyDictionary[Any, list[Listener]] = weakref.WeakKeyDictionary()


def listen(owner: Any, listener: Listener) -> None:
    """Notify a listener of an owner's steps from now on; the owner is not kept alive."""
    listeners.setdefault(owner, []).append(listener)


def unlisten(listener: Listener) -> None:
    """Stop notifying a listener, whatever its owners."""
    for owner, each in [*listeners.items()]:
        rest = [other for other in each if other is not listener]
        if rest:
            listeners[owner] = rest
        else:
            del listeners[owner]


def heard(*owners: Any) -> list[Listener]:
    """Return the listeners of the owners, each once; an owner that is None has none."""
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
    """Notify listeners that gradients are complete; the `with` block takes the step, or raises."""
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


def notify(notified: Sequence[Listener], note: StepNote) -> None:
    """Notify all listeners of a step's outcome; then raise the first error that one raised."""
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
    """Return the norm of all gradients, and the smallest factor that clipping multiplies by."""
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
