"""`python -m apex_mp explain`: print the part of docs/troubleshooting.md that a warning names."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, where setup.py has copied it; and in the sources.
_PLACES = (_PACKAGE / "troubleshooting.md", _PACKAGE.parent / "docs" / "troubleshooting.md")


def main(arguments: Sequence[str]) -> int:
    """Print one section, or the names of all.

    Returns:
        0; a name that is not there ends the program with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp explain",
        allow_abbrev=False,
        description="Print what a warning or error of apex_mp means and what to do about it. "
        "Without a name: the names of all sections.",
    )
    parser.add_argument("name", nargs="?", help="what a message ends in, such as updates-are-lost")
    name = parser.parse_args(arguments).name
    found = sections()
    if name is None:
        print("\n".join(found))
        return 0
    if name not in found:
        near = difflib.get_close_matches(name, found, n=3, cutoff=0.4)
        wish = f"did you mean {' or '.join(near)}?" if near else "without a name all are listed"
        parser.error(f"name is {name!r}; there is no such section, {wish}")
    print(found[name])
    return 0


def sections() -> dict[str, str]:
    """Return the sections of the page by their anchors, as Markdown."""
    page = next(place for place in _PLACES if place.is_file()).read_text("utf-8")
    # Comments are for the site and the tests.
    page = re.sub(r"^<!-- .* -->\n\n?", "", page, flags=re.MULTILINE)
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {_anchor(part.partition("\n")[0]): f"## {part.rstrip()}" for part in parts}


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
