"""Names that are spelled wrong; without torch, which may be missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a name that is unknown: the nearest known one."""
    near = difflib.get_close_matches(given, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
