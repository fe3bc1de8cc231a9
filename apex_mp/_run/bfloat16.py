"""`--dtype bfloat16`: casts to float16 in a script become casts to bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp import amp
from apex_mp._run.replacements import Replacements


def cast_instead(replacements: Replacements) -> None:
    """Replace `half()`, `to(torch.float16)`, and the default dtype of amp and autocast."""
    for owner in (Tensor, torch.nn.Module):
        replacements.set(owner, "half", _half)
        replacements.set(owner, "to", _to(owner.to))
    autocast = torch.amp.autocast_mode.autocast
    replacements.set(autocast, "__init__", _autocast(autocast.__init__))
    for module, name in (
        (amp, "init"),
        (amp.amp, "init"),
        (amp, "initialize"),
        (amp.frontend, "initialize"),
    ):
        replacements.set(module, name, _by_default(getattr(module, name)))


def _half(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.bfloat16(*args, **kwargs)


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name: _instead(value) for name, value in kwargs.items()}
        return original(self, *map(_instead, args), **named)

    return to


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(  # noqa: N807
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if dtype is None or dtype is torch.float16:
            dtype = torch.bfloat16
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _instead(value: Any) -> Any:
    return torch.bfloat16 if value is torch.float16 else value


def _by_default(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"dtype": torch.bfloat16, **kwargs})

    return function
