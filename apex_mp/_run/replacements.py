"""Attributes that are replaced for a run, and can be put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Replacements:
    """What has been set, in order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class, new or not."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.at_undo(lambda: delattr(owner, name))
        else:
            self.at_undo(lambda: setattr(owner, name, before))

    def at_undo(self, call: Callable[[], object]) -> None:
        """Have something else called when all is put back."""
        self._undo.append(call)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            self._undo.pop()()


def called_by_torch(depth: int = 2) -> bool:
    """Tell whether the caller of a replacement is code of torch or of ours, not of the script.

    Args:
        depth: How many frames above this function the caller is [2].
    """
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] in ("torch", "apex_mp")
