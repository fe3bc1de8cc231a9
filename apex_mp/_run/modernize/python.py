"""Names that Python and numpy have dropped, and options that torch's launchers spell anew."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements

# What numpy's names were.
_NUMPY: dict[str, Any] = {
    "bool": bool,
    "complex": complex,
    "float": float,
    "int": int,
    "long": int,
    "object": object,
    "str": str,
    "unicode": str,
}
_NUMPY_2 = {"Inf": "inf", "NaN": "nan", "float_": "float64", "product": "prod", "unicode_": "str_"}
NUMPY_NAMES = (*_NUMPY, *_NUMPY_2)
# Abstract classes that were in collections itself until Python 3.10.
ABSTRACT = tuple(name for name in collections.abc.__all__ if not hasattr(collections, name))
ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")


def supply(replacements: Replacements) -> None:
    """Add the names where they are missing."""
    _add(replacements, inspect, {"getargspec": lambda: _getargspec})
    classes = {name: functools.partial(getattr, collections.abc, name) for name in ABSTRACT}
    _add(replacements, collections, classes)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        names: dict[str, Callable[[], Any]] = {
            name: functools.partial(_value, value) for name, value in _NUMPY.items()
        }
        names |= {old: functools.partial(getattr, numpy, new) for old, new in _NUMPY_2.items()}
        _add(replacements, numpy, names)
    parse = argparse.ArgumentParser.parse_known_args
    replacements.set(argparse.ArgumentParser, "parse_known_args", _with_old_spelling(parse))


def _value(value: Any) -> Any:
    return value


def _add(
    replacements: Replacements, module: ModuleType, names: Mapping[str, Callable[[], Any]]
) -> None:
    """Let a module find more names, and say so when one is asked for."""
    before = getattr(module, "__getattr__", None)

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in names:
            note(f"{module.__name__}.{name}", "as it was")
            return names[name]()
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    replacements.set(module, "__getattr__", __getattr__)


def _getargspec(func: Callable[..., Any]) -> ArgSpec:
    spec = inspect.getfullargspec(func)
    return ArgSpec(spec.args, spec.varargs, spec.varkw, spec.defaults)


def _with_old_spelling(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parse_known_args(
        self: argparse.ArgumentParser,
        args: Sequence[str] | None = None,
        namespace: Any = None,
    ) -> Any:
        known = self._option_string_actions
        words = sys.argv[1:] if args is None else [*args]
        if "--local_rank" in known and "--local-rank" not in known:
            for index, word in enumerate(words):
                if word.partition("=")[0] == "--local-rank":
                    note("--local-rank", "taken for the --local_rank that the script declares")
                    words[index] = word.replace("--local-rank", "--local_rank", 1)
        return parse(self, words, namespace)

    return parse_known_args
