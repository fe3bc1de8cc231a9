"""Says once for each thing that was supplied that it was."""

from __future__ import annotations

import sys

_said: set[str] = set()


def note(name: str, what: str) -> None:
    """Print a line to stderr, the first time in this process.

    Args:
        name: What the script says.
        what: What it is given.
    """
    if name not in _said:
        _said.add(name)
        print(f"apex_mp run: --modernize: {name}: {what}", file=sys.stderr)


def forget() -> None:
    """Say everything again."""
    _said.clear()
