"""Division of integers into an integer tensor, which is an error since torch 1.6."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements


def supply(replacements: Replacements) -> None:
    """Round quotients that go into integers towards zero, as beam searches expect."""
    replacements.set(torch, "div", _div(torch.div))
    for name in ("div_", "__itruediv__"):
        replacements.set(Tensor, name, _div_(getattr(Tensor, name)))


def _div(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def div(*args: Any, **kwargs: Any) -> Tensor:
        out = kwargs.get("out")
        if out is not None and len(args) == 2 and _all_integers(out, *args, **kwargs):
            _note()
            kwargs["rounding_mode"] = "trunc"
        return original(*args, **kwargs)

    return div


def _div_(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def div_(self: Tensor, other: Any, **kwargs: Any) -> Tensor:
        if _all_integers(self, other, **kwargs):
            _note()
            return self.copy_(torch.div(self, other, rounding_mode="trunc"))
        return original(self, other, **kwargs)

    return div_


def _all_integers(*values: Any, rounding_mode: Any = None, out: Any = None) -> bool:
    return rounding_mode is None and all(map(_is_integer, values))


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        dtype = value.dtype
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return isinstance(value, int) and not isinstance(value, bool)


def _note() -> None:
    note("division of integers into an integer tensor", "rounds towards zero")
