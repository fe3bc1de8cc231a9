"""Attributes that are replaced for a run, and can be restored."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from torch.jit import _builtins

_ABSENT = object()


class Replacements:
    """The attributes that were set, in order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class, new or not."""
        before = vars(owner).get(name, _ABSENT)
        if isinstance(owner, ModuleType) and getattr(value, "__wrapped__", None) is before:
            self._compile_as(value, before)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.at_undo(lambda: delattr(owner, name))
        else:
            self.at_undo(lambda: setattr(owner, name, before))

    def _compile_as(self, value: Any, before: Any) -> None:
        """Make torch.jit.script compile the original instead of its replacement."""
        operator = _builtins._find_builtin(before)  # type: ignore[no-untyped-call]
        if operator is not None:
            _builtins._register_builtin(value, operator)
            self.at_undo(lambda: (_builtins._builtin_table or {}).pop(id(value), None))
        else:
            ready = getattr(before, "__prepare_scriptable__", lambda: before)
            value.__prepare_scriptable__ = ready

    def at_undo(self, call: Callable[[], object]) -> None:
        """Register a function that `undo` calls."""
        self._undo.append(call)

    def undo(self) -> None:
        """Restore all attributes, the last one first."""
        while self._undo:
            self._undo.pop()()


def called_by_torch() -> bool:
    """Return whether the caller of a replacement is code of torch or of ours, not of the script.

    A replacement may wrap another one, that of `--device cpu` one of `--modernize`; the caller of
    the outermost counts.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_of_a_replacement(frame):
        frame = frame.f_back
    return _module(frame).partition(".")[0] in ("torch", "apex_mp")


def _is_of_a_replacement(frame: FrameType) -> bool:
    return f"{_module(frame)}.".startswith("apex_mp._run.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def to_scripts(value: Any, truth: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns `truth()` to torch and `value` to scripts."""
    return unless_torch(lambda *_, **__: value, truth)


def unless_torch(ours: Callable[..., Any], truth: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `truth` when torch calls it, and otherwise ours."""

    @functools.wraps(truth)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (truth if called_by_torch() else ours)(*args, **kwargs)

    return function
