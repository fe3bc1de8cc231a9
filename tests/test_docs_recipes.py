"""docs/recipes/: each page holds what its commands printed when benchmarks.recipes ran them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recipes

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

PAGES = sorted(recipes.PAGES.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_holds_what_its_commands_printed(page: Path) -> None:
    shown = recipes.blocks(page.read_text())
    assert page.read_text().count("```console\n") == len(shown), "a block without its command"
    if shown:
        printed = json.loads((recipes.RESULTS / f"{page.stem}.json").read_text())["blocks"]
        assert shown == printed, f"run python -m benchmarks.recipes {page.stem}"


def test_output_is_written_below_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "PAGES", tmp_path)
    monkeypatch.setattr(recipes, "RESULTS", tmp_path / "results")
    page = tmp_path / "sums.md"
    block = "```console\n$ python -c 'print({})'\n{}```\n"
    page.write_text("# Sums\n" + block.format("1 + 1", "") + "and\n" + block.format("2", "0\n"))
    recipes.renew("sums")
    assert page.read_text() == (
        "# Sums\n" + block.format("1 + 1", "2\n") + "and\n" + block.format("2", "2\n")
    )
    results = json.loads((tmp_path / "results" / "sums.json").read_text())
    assert [each["output"] for each in results["blocks"]] == ["2\n", "2\n"]


def test_a_command_that_fails_leaves_the_page_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "PAGES", tmp_path)
    monkeypatch.setattr(recipes, "RESULTS", tmp_path / "results")
    page = tmp_path / "fails.md"
    page.write_text("```console\n$ python -c 'raise SystemExit(3)'\nold\n```\n")
    before = page.read_text()
    with pytest.raises(SystemExit, match="failed with exit status 3"):
        recipes.renew("fails")
    assert page.read_text() == before
    assert not (tmp_path / "results").exists()
