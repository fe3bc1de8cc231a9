"""Masks of uint8, which comparisons returned before torch 1.2, and arithmetic with bool masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements, called_by_torch

# Functions whose first argument after the tensor is a mask.
_MASKED = ("masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select")


def supply(replacements: Replacements) -> None:
    """Make torch accept uint8 masks for bool ones, and subtract and invert bool masks."""
    for name in _MASKED:
        for owner in (Tensor, torch):
            if hasattr(owner, name):
                replacements.set(owner, name, _masked(name, getattr(owner, name)))
    for owner in (Tensor, torch):
        for name in ("index_put", "index_put_"):
            replacements.set(owner, name, _index_put(name, getattr(owner, name)))
    replacements.set(torch, "where", _where(torch.where))
    for name in ("__sub__", "__rsub__"):
        replacements.set(Tensor, name, _subtraction(getattr(Tensor, name)))
    replacements.set(Tensor, "__invert__", _inversion(Tensor.__invert__))


def _as_bool(name: str, mask: Any) -> Any:
    if isinstance(mask, Tensor) and mask.dtype == torch.uint8:
        note(f"{name} with a uint8 mask", "taken for a bool one")
        return mask.bool()
    return mask


def _masked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_as_bool(name, args[0]), *args[1:])
        if "mask" in kwargs:
            kwargs["mask"] = _as_bool(name, kwargs["mask"])
        return original(self, *args, **kwargs)

    return wrapper


def _where(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(_as_bool("where", condition), *args, **kwargs)

    return where


def _index_put(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def index_put(self: Tensor, indices: Any, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, [_as_bool(name, index) for index in indices], *args, **kwargs)

    return index_put


def _subtraction(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def subtract(self: Tensor, other: Any) -> Any:
        values = (self, other)
        if any(isinstance(value, Tensor) and value.dtype == torch.bool for value in values):
            note("- with a bool mask", "counts it as uint8, as before torch 1.2")
            mine, theirs = (_as_number(value) for value in values)
            return original(mine, theirs)
        return original(self, other)

    return subtract


def _as_number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return value.to(torch.uint8)
    return value


def _inversion(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def invert(self: Tensor) -> Any:
        is_mask = self.dtype == torch.uint8 and not called_by_torch() and not bool((self > 1).any())
        if is_mask:
            note("~ of a uint8 mask", "is 1 - mask, not 255 - mask, as before torch 1.2")
            return 1 - self
        return original(self)

    return invert
