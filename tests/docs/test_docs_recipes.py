"""docs/recipes/: each page holds what its commands printed when benchmarks.recipes ran them."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import recipes

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(recipes.PAGES.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_what_each_command_printed_is_kept(page: Path) -> None:
    text = page.read_text()
    commands = recipes.commands(text)
    assert text.count("```console\n") == len(commands), "a block that is not one command"
    if commands:
        printed = json.loads((recipes.RESULTS / f"{page.stem}.json").read_text())["blocks"]
        kept = [each["command"] for each in printed]
        assert commands == kept, f"run python -m benchmarks.recipes {page.stem}"
        assert all(each["output"].strip() for each in printed)


PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn"}
COME_ALONG = {"PIL", "numpy"}  # with matplotlib and with scikit-learn
OPTIONAL = {"torchvision"}


def needed(program: Path, seen: set[Path]) -> set[str]:
    """Return what pip must install for a program of examples/, besides torch and apex_mp."""
    seen.add(program)
    names: set[str] = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    here = {program.with_name(f"{name}.py") for name in names}
    for each in {path for path in here if path.exists()} - seen:
        names |= needed(each, seen)
    ours = {path.stem for path in (ROOT / "examples").rglob("*.py")} | {"torch", "apex_mp"}
    return names - sys.stdlib_module_names - ours


RECIPES = [
    page
    for page in PAGES
    if page.stem not in ("docker", "index")  # The image has them.
    and re.search(r"examples/[\w/]+\.py", page.read_text())
]


@pytest.mark.parametrize("page", RECIPES, ids=[page.stem for page in RECIPES])
def test_a_page_says_what_its_program_needs(page: Path) -> None:
    text = page.read_text()
    programs = {ROOT / each for each in re.findall(r"examples/[\w/]+\.py", text)}
    names = set().union(*(needed(each, set()) for each in programs)) - OPTIONAL
    wanted = {PACKAGES.get(name, name) for name in names - COME_ALONG}
    told = {name for line in re.findall(r"pip install ([\w -]+)", text) for name in line.split()}
    assert told == wanted
