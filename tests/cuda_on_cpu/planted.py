"""Bugs planted into a copy of csrc/ one by one: what the nets are worth.

The code of a bug may move to another line or file: it must be the only one of csrc/, or the first
one behind the only one of its scope, a signature for example. White space does not matter. Its
tests are a file or a function of it, then "-k" and what is wanted of it: a few of those of its net,
a key of nets.NETS, to keep the run short. They must fail in its words, a regular expression.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from bugs import Bug, read
from builder import CSRC
from nets import INSIDE, NETS, Net

BUGS = read(*sorted(Path(__file__).parent.glob("*.bugs")), INSIDE=INSIDE)


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each file below csrc/."""
    return {path.relative_to(CSRC).as_posix(): path.read_text() for path in CSRC.rglob("*.*")}


def places(text: str) -> list[tuple[str, re.Match[str]]]:
    """Return files of csrc/ and where they hold a text, whose white space does not matter."""
    tokens = [re.escape(token) for token in re.findall(r"\w+|[^\w\s]", text)]
    pattern = re.compile(r"\s*".join(tokens))
    return [(file, found) for file, code in sources().items() for found in pattern.finditer(code)]


def place(bug: Bug) -> tuple[str, re.Match[str]]:
    """Return the file below csrc/ that a bug changes, and where."""
    found = places(bug.before)
    if bug.scope:
        ((file, scope),) = places(bug.scope)
        behind = [each for each in found if each[0] == file and each[1].start() > scope.end()]
        found = behind[:1]
    assert len(found) == 1, f"csrc/ must hold this once, not {len(found)} times: {bug.before}"
    return found[0]


def plant(bug: Bug, copy: Path) -> None:
    """Make `copy` a copy of csrc/ with the bug; files that are so already keep their time."""
    changed, where = place(bug)
    for file, text in sources().items():
        if file == changed:
            text = f"{text[: where.start()]}{bug.after}{text[where.end() :]}"
        target = copy / file
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    for path in copy.rglob("*.*"):
        if not (CSRC / path.relative_to(copy)).exists():
            path.unlink()  # of an earlier csrc/


def short_net(bug: Bug) -> Net:
    """Return the tests of a bug alone, on the grid and in the order of its net."""
    where, _, names = bug.tests.partition(" -k ")
    tests = (where, *(("-k", names) if names else ()))
    return dataclasses.replace(NETS[bug.net or "wide grid, forward"], tests=tests)
