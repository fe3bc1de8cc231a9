"""Training loops: zero_grad to zeros, schedulers with `verbose`, losses with empty targets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import lr_scheduler

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements


def supply(replacements: Replacements) -> None:
    """Replace zero_grad, the schedulers' constructors, and the losses over classes."""
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        replacements.set(owner, "zero_grad", _zero_grad(owner.zero_grad))
    for scheduler in vars(lr_scheduler).values():
        if inspect.isclass(scheduler) and issubclass(scheduler, lr_scheduler.LRScheduler):
            has_it = "verbose" in inspect.signature(scheduler.__init__).parameters
            if "__init__" in vars(scheduler) and not has_it:
                original = vars(scheduler)["__init__"]
                replacements.set(scheduler, "__init__", _quiet(scheduler.__name__, original))
    for name in ("cross_entropy", "nll_loss"):
        replacements.set(functional, name, _of_some_target(name, getattr(functional, name)))


def _zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool | None = None) -> None:
        if set_to_none is None:
            note("zero_grad()", "writes zeros instead of taking the gradients away")
        original(self, bool(set_to_none))

    return zero_grad


def _quiet(name: str, original: Callable[..., None]) -> Callable[..., None]:
    parameters = [*inspect.signature(original).parameters]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # By its place it is the last one; ReduceLROnPlateau had it after patience.
        place = 4 if name == "ReduceLROnPlateau" else len(parameters) - 1
        if len(args) > place and isinstance(args[place], bool):
            kwargs["verbose"], args = args[place], (*args[:place], *args[place + 1 :])
        if "verbose" in kwargs:
            note(f"{name}(verbose=...)", "taken and ignored")
            del kwargs["verbose"]
        original(self, *args, **kwargs)

    return __init__


def _of_some_target(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        value = original(*args, **kwargs)
        if value.dim() > 0 or not bool(value.isnan()):
            return value
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        scores, target = given.arguments["input"], given.arguments["target"]
        if target.is_floating_point() or bool((target != given.arguments["ignore_index"]).any()):
            return value
        note(f"{name} of ignored targets only", "is 0 instead of NaN")
        return scores[:0].sum()  # type: ignore[no-any-return]

    return loss
