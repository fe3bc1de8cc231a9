"""Notes on stderr, once for each feature that `--modernize` supplies."""

from __future__ import annotations

import sys

_said: set[str] = set()


def note(name: str, what: str) -> None:
    """Print a line to stderr, the first time in this process."""
    if name not in _said:
        _said.add(name)
        print(f"apex_mp run: --modernize: {name}: {what}", file=sys.stderr)


def forget() -> None:
    """Print all notes again at their next use."""
    _said.clear()
