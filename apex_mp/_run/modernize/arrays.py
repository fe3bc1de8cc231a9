"""Functions of numpy that do less than they did."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements


def supply(replacements: Replacements) -> None:
    """Restore ragged arrays, `copy=False`, binary `fromstring`, and reading of pickles."""
    if importlib.util.find_spec("numpy") is None:
        return
    numpy: Any = importlib.import_module("numpy")
    for name in ("array", "asarray", "asanyarray"):
        replacements.set(numpy, name, _of_any(name, getattr(numpy, name), numpy))
    replacements.set(numpy, "fromstring", _fromstring(numpy.fromstring, numpy))
    replacements.set(numpy, "load", _load(numpy.load))
    replacements.set(numpy, "save", _save(numpy.save, numpy))


def _of_any(name: str, original: Callable[..., Any], numpy: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def array(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if "Unable to avoid copy" in str(error):
                note(f"numpy.{name}(copy=False)", "copies where it must, as numpy.asarray")
                return original(*args, **{**kwargs, "copy": None})
            is_plain = len(args) == 1 and kwargs.get("dtype") is None
            if "inhomogeneous shape" not in str(error) or not is_plain:
                raise
        note(f"numpy.{name} of rows of different lengths", "is an array of objects")
        return original(*args, **{**kwargs, "dtype": object})

    return array


def _fromstring(original: Callable[..., Any], numpy: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def fromstring(
        string: Any,
        dtype: Any = float,
        count: int = -1,
        sep: str = "",
        **kwargs: Any,
    ) -> Any:
        if sep:
            return original(string, dtype, count, sep, **kwargs)
        note("numpy.fromstring of bytes", "is numpy.frombuffer, copied")
        data = string.encode("latin1") if isinstance(string, str) else string
        return numpy.frombuffer(data, dtype, count).copy()

    return fromstring


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(file: Any, mmap_mode: Any = None, allow_pickle: Any = None, **kwargs: Any) -> Any:
        loaded = original(file, mmap_mode, allow_pickle is None or allow_pickle, **kwargs)
        dtype = getattr(loaded, "dtype", None)  # An archive reads its arrays later.
        if allow_pickle is None and (dtype is None or dtype.hasobject):
            note("numpy.load", "reads any pickle (allow_pickle=True), which may run its code")
        return loaded

    return load


def _save(original: Callable[..., None], numpy: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def save(file: Any, arr: Any, *args: Any, **kwargs: Any) -> None:
        original(file, numpy.asanyarray(arr), *args, **kwargs)  # It may be ragged.

    return save
