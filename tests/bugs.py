"""Bugs that tests must find, in one format: `*.bugs`, of lines of apex_mp/ and of csrc/.

    NAME = what $NAME or ${NAME} stands for below

    a sentence that says what is wrong @ scope [tests | words | net]
    - the code as it is
    + the code with the bug; without this line it is left out

`mutants/mutant.py` and `cuda_on_cpu/planted.py` say how the code is found, and what tests, words
and net are; there may be no scope, words and net. A line with "#" at its beginning is a comment.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAMED = re.compile(r"(\w+) = (.*)")
_FIRST = re.compile(r"(?P<name>.*?)(?: @ (?P<scope>.*?))? \[(?P<fields>.*)\]")


class Bug(NamedTuple):
    """A change of the code, and the tests that must fail with it."""

    scope: str
    before: str
    after: str
    tests: str
    words: str = ""
    net: str = ""


def read(*paths: Path, **names: object) -> dict[str, Bug]:
    """Return the bugs of files by their sentences; names of a file hold in those after it, too."""
    found: dict[str, Bug] = {}
    for path in paths:
        for name, bug in _bugs_of(path.read_text(), names):
            assert name not in found, f"two bugs are called {name}"
            found[name] = bug
    return found


def _bugs_of(text: str, names: dict[str, object]) -> Iterator[tuple[str, Bug]]:
    for block in re.split(r"\n\n+", text):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        while lines and (named := _NAMED.fullmatch(lines[0])):
            names[named[1]] = string.Template(named[2]).safe_substitute(names)
            lines.pop(0)
        if not lines:
            continue
        first = _FIRST.fullmatch(lines[0])
        assert first is not None, lines[0]
        code = ("\n".join(line[2:] for line in lines[1:] if line[0] == sign) for sign in "-+")
        fields = string.Template(first["fields"]).safe_substitute(names).split(" | ")
        yield first["name"], Bug(first["scope"] or "", *code, *fields)
