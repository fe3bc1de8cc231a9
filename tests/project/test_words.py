"""Names, comments and docstrings have the terms of docs/glossary.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import apex_mp

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PACKAGE = Path(apex_mp.__file__).parent
ROOT = PACKAGE.parent
# What to write instead is in docs/glossary.md, or says who acts: the caller, the host, the device.
RETIRED = re.compile(
    r"told|tells?|settle[sd]?|came_in|own_params|verdict|lie_as|brings?|brought|homes?|wishes"
    r"|followers|stay_here|rooms?|rim|dear|whoever|somebody|seen|marks|marked",
    re.IGNORECASE,
)
FILES = [
    path
    for root, endings in ((PACKAGE, {".py", ".pyi"}), (ROOT / "csrc", {".h", ".cpp", ".cu"}))
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


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of comments, docstrings, and names of functions and classes."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "lineno", 1), getattr(node, "name", "")
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def retired(path: Path, texts: Iterable[tuple[int, str]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for line, text in texts
        for word in re.findall(r"[A-Za-z]+(?:_[a-z]+)*", text)
        if any(RETIRED.fullmatch(part) for part in (word, *word.split("_")))
    ]


def test_the_package_has_no_retired_word() -> None:
    assert [found for path in FILES for found in retired(path, words(path))] == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_what_is_around_it_says_none_in_prose(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    found = [found for path in paths for found in retired(path, prose(path))]
    # An edit is seen, a test is marked.
    assert [each for each in found if not re.search(r"_seen|: (seen|mark)", each)] == []
