"""Names, comments and docstrings of the package and of csrc/ have the terms of docs/glossary.md."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import apex_mp

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PACKAGE = Path(apex_mp.__file__).parent
CSRC = PACKAGE.parent / "csrc"
# What to write instead is in docs/glossary.md, or says who acts: the caller, the host, the device.
RETIRED = re.compile(
    r"told|tells?|settle[sd]?|came_in|own_params|verdict|lie_as|brings?|brought|homes?|wishes"
    r"|followers|stay_here|rooms?|rim|dear|whoever|somebody|seen|marks|marked",
    re.IGNORECASE,
)
FILES = [
    path
    for root, endings in ((PACKAGE, {".py", ".pyi"}), (CSRC, {".h", ".cpp", ".cu"}))
    for path in sorted(root.rglob("*"))
    if path.suffix in endings
]


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of all that is written there, but for methods of other objects."""
    text = path.read_text(encoding="utf-8")
    if path.suffix.startswith(".py"):
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if not (token.type == tokenize.NAME and before == "."):
                yield token.start[0], token.string
            before = token.string
    else:
        yield from enumerate(text.splitlines(), 1)


def test_no_file_has_a_retired_word() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {word}"
        for path in FILES
        for line, text in words(path)
        for word in re.findall(r"[A-Za-z]+(?:_[a-z]+)*", text)
        if any(RETIRED.fullmatch(part) for part in (word, *word.split("_")))
    ]
    assert found == []
