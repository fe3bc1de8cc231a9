"""Notify listeners, such as apex_mp.monitor, of the outcome of steps; without any it is one test.

A holder of a loss scale takes a step within `announced`, and calls `after` when it knows what
became of the step, in the order of the steps. On a device that the host does not wait for that is
later. Listeners are kept beside their owner, not on it: a copy of an optimizer has none.
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

from apex_mp.core.grads import NonFinite


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


def after(*owners: Any, note: StepNote) -> None:
    """Notify listeners of the outcome of a step. They may raise: finish the step before.

    All are notified; then the first error is raised.
    """
    errors = []
    for listener in heard(*owners):
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
