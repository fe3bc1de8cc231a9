"""README and docs/: each block of code is run by a test or says why not, and what is named exists.

A block is run here as it stands, or the comment above it says `run by FILE` or `not run: REASON`; a
comment in the page may say so of `all blocks`. Output is marked `text`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from apex_mp._check import explain

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = {"python", "diff", "sh", "console", "cpp"}
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SAYING = r"<!-- {}(?:run by (?P<by>[^\s;]+)|not run: (?P<why>[^>]+?))(?:;[^>]*)? -->\n"
OF_ALL, OF_NEXT = re.compile(SAYING.format("all blocks ")), re.compile(SAYING.format("") + "$")


class Block(NamedTuple):
    page: str
    language: str
    code: str
    by: str | None
    why: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    of_all = OF_ALL.search(text)
    for found in FENCE.finditer(text):
        said = OF_NEXT.search(text, 0, found.start()) or of_all
        by, why = (said["by"], said["why"]) if said else (None, None)
        yield Block(page.relative_to(ROOT).as_posix(), found[2], found[3], by, why)


BLOCKS = [block for page in PAGES for block in blocks(page)]
HERE = [block for block in BLOCKS if block.language == "python" and not (block.by or block.why)]


@pytest.mark.usefixtures("amp_off")
@pytest.mark.parametrize("block", HERE, ids=[f"{b.page}-{i}" for i, b in enumerate(HERE)])
def test_a_block_runs_as_it_stands(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block.code, names)


def test_every_other_block_says_which_test_runs_it_or_why_none_does() -> None:
    others = [b for b in BLOCKS if b.language in CODE - {"python"} or b.by]
    unsaid = [f"{b.page}: {b.code[:60]!r}" for b in others if not (b.by or b.why)]
    # benchmarks.recipes runs these, and tests/docs/test_docs_recipes.py compares what they printed.
    assert not [each for each in unsaid if not (each.startswith("docs/recipes/") and "'$ " in each)]
    for block in others:
        if block.by:
            test = ROOT / block.by
            assert test.exists(), block
            assert Path(block.page).name in test.read_text() or block.page in test.read_text(), (
                block
            )


def test_blocks_are_fenced_and_say_what_they_are() -> None:
    known = CODE | {"text", "json", "mermaid", "{toctree}", "{eval-rst}", "{include}"}
    assert {block.language for block in BLOCKS} <= known
    for page in PAGES:
        text = FENCE.sub("", page.read_text("utf-8"))
        indented = re.findall(r"^(?![ ]*[-*\d]).*\n\n(    \S.*)", text, re.MULTILINE)
        assert not indented, f"{page.name}: write a fenced block: {indented}"


PAGES_ON_GPUS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("gpu", "memory", "trainers", "works_with")),
    *(f"docs/recipes/{name}.md" for name in ("custom_op", "rl_fp16")),
)


@pytest.mark.parametrize("page", PAGES_ON_GPUS)
def test_pages_say_the_same_of_gpus(page: str) -> None:
    text = re.sub(r"\(\S+\)", "", " ".join((ROOT / page).read_text().split()))
    assert "Commit 8160a19 has run on [one H100]; no GPU has run what came after it" in text


def test_the_rule_that_is_shown_is_that_of_adagrad() -> None:
    (block,) = [block for block in BLOCKS if block.page == "docs/add_an_optimizer.md"]
    rule = (ROOT / "csrc" / "math" / "adagrad.h").read_text()
    assert all(line in rule for line in block.code.splitlines())


def test_every_public_package_has_a_page_of_its_api() -> None:
    shown = {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"(?:auto|py:)module:: ([\w.]+)", page.read_text())
    }
    home = ROOT / "apex_mp"
    inner = {"core", "engine", "grads", "masters", "saved", "scale", "step", "trainers"}
    packages = {path.parent.name for path in home.glob("*/__init__.py")} - inner
    modules = {path.stem for path in home.glob("*.py")} - {"as_apex"}  # an import with an effect
    public = {name for name in packages | modules if not name.startswith("_")}
    assert {f"apex_mp.{name}" for name in public - {"RNN"}} <= shown
    assert "apex_mp.RNN.models" in shown


def test_the_tests_named_as_holding_what_works_exist() -> None:
    text = (ROOT / "docs" / "works_with.md").read_text()
    named = re.findall(r"\| `(tests/\S+\.py)` \|$", text, re.MULTILINE)
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / name).is_file()]
    # Where there is no test, the row must not say that it works.
    for row in re.findall(r"^\| .* \| (\S+) \|.*\|  ?\|$", text, re.MULTILINE):
        assert row == "untested"


def test_every_warning_ends_in_a_part_of_troubleshooting_that_is_there() -> None:
    package = ROOT / "apex_mp"
    parts = {*explain.sections()}
    named, without = set(), []
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            words = ast.unparse(call)
            name = ast.unparse(call.func)
            if name in ("warn", "see", "log.see"):
                anchors = [a.value for a in call.args if isinstance(a, ast.Constant)]
                named |= {a for a in anchors if isinstance(a, str) and "-" in a and " " not in a}
            elif name.endswith(".warning") and "see(" not in words:
                without.append(path.relative_to(package).as_posix())
    assert named - {"%s"} <= parts
    assert len(named) > 12
    # What apex said, in its words; and a message that is put together in the lines before.
    assert sorted(without) == [
        "amp/_scale_loss/block.py",
        "fp16_utils/_stepping.py",
        "fp16_utils/fp16_optimizer.py",
        "grads/nonfinite.py",
        "monitor/_monitor.py",
        "parallel/distributed.py",
    ]


@pytest.mark.parametrize("name", ["amp", "optimizers"])
def test_pages_with_an_order_of_their_own_have_every_public_name(name: str) -> None:
    page = (ROOT / "docs" / "api" / f"{name}.md").read_text()
    # A page for each class, in the order of the sidebar, or one for all.
    files = re.findall(rf"^{name}/\w+$", page, re.MULTILINE)
    shown = [page, *((ROOT / "docs" / "api" / f"{file}.md").read_text() for file in files)]
    members = re.findall(r"auto(?:class|function):: (\w+)", "\n".join(shown))
    (table,) = re.findall(r":nosignatures:\n\n([\s\w]+)\n", page)
    public = {each for each in importlib.import_module(f"apex_mp.{name}").__all__ if each[0] != "_"}
    assert members == table.split()
    assert {*members} == public


def test_the_sidebar_calls_pages_by_their_titles() -> None:
    for page in PAGES:
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            assert {*re.findall("^.*<.*>$", tree, re.MULTILINE)} <= {"Start <self>"}, page
