"""Functions of torch whose defaults or results have changed."""

from __future__ import annotations

import collections.abc
import functools
import math
import queue
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from apex_mp._run.modernize.notes import note
from apex_mp._run.modernize.source import on_leaf
from apex_mp._run.replacements import Replacements, called_by_torch

_VIEW = "view size is not compatible"


def supply(replacements: Replacements) -> None:
    """Restore torch._six, reading pickles, full, view, Fourier transforms, loaders' classes."""
    _supply_six(replacements)
    replacements.set(torch, "load", _load(torch.load))
    replacements.set(torch, "full", _full(torch.full))
    replacements.set(Tensor, "view", _view(Tensor.view))
    for name in ("__iadd__", "__isub__", "__imul__"):
        replacements.set(Tensor, name, _in_place(getattr(Tensor, name)))
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    replacements.set(iterator, "next", _next)
    sampler = torch.utils.data.Sampler
    replacements.set(sampler, "__init__", _sampler(sampler.__init__))
    for owner in (torch, Tensor):
        replacements.set(owner, "stft", _stft(owner.stft))
        replacements.set(owner, "istft", _istft(owner.istft))


class _Six(ModuleType):
    """torch._six, with a note when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _SIX:
            raise AttributeError(f"module 'torch._six' has no attribute {name!r}")
        note("torch._six", "made anew")
        return _SIX[name]


_SIX: dict[str, Any] = {
    "PY2": False,
    "PY3": True,
    "PY37": True,
    "container_abcs": collections.abc,
    "string_classes": (str, bytes),
    "int_classes": int,
    "inf": math.inf,
    "nan": math.nan,
    "queue": queue,
    "FileNotFoundError": FileNotFoundError,
}


def _supply_six(replacements: Replacements) -> None:
    six = _Six("torch._six")
    replacements.set(torch, "_six", six)
    sys.modules["torch._six"] = six
    replacements.at_undo(lambda: sys.modules.pop("torch._six", None))


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is None:
            note("torch.load", "reads any pickle (weights_only=False), which may run its code")
            kwargs["weights_only"] = False
        return original(*args, **kwargs)

    return load


def _full(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def full(size: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Tensor:
        plain = kwargs.get("dtype") is None and kwargs.get("out") is None
        if plain and isinstance(fill_value, int) and not called_by_torch():
            note("torch.full", "of an int is of the default floating dtype")
            kwargs["dtype"] = torch.get_default_dtype()
        return original(size, fill_value, *args, **kwargs)

    return full


def _view(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def view(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            if _VIEW not in str(error):
                raise
        note("Tensor.view", "of a tensor that is not contiguous copies it, as reshape does")
        return self.reshape(*args, **kwargs)

    return view


def _in_place(original: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change(self: Tensor, other: Any) -> Any:
        return on_leaf(self, lambda: original(self, other))

    return change


def _sampler(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *data_source: Any, **kwargs: Any) -> None:  # noqa: N807
        if data_source or kwargs:
            note("Sampler.__init__(data_source)", "taken and ignored")
        original(self)

    return __init__


def _stft(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def stft(*args: Any, **kwargs: Any) -> Tensor:
        is_plain = len(args) < 10 and kwargs.get("return_complex") is None
        if not is_plain or torch.is_complex(args[0] if args else kwargs["input"]):
            return original(*args, **kwargs)
        note("torch.stft without return_complex", "returns pairs of numbers, as it did")
        return torch.view_as_real(original(*args, **{**kwargs, "return_complex": True}))

    return stft


def _istft(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def istft(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        if not torch.is_complex(input):
            note("torch.istft of pairs of numbers", "takes them for complex ones")
            input = torch.view_as_complex(input.contiguous())  # noqa: A001
        return original(input, *args, **kwargs)

    return istft


def _next(self: Any) -> Any:
    note("DataLoader iterator.next()", "as next(iterator)")
    return next(self)
