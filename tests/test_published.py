"""docs/data.md shows all results, made anew for the site, and other pages quote them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import published

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

DOCS = Path(__file__).resolve().parent.parent / "docs"
# CI reads the first; the page of the recipe shows the second.
SHOWN_ELSEWHERE = {"nightly.json", "digits-cpu.json"}


def test_every_file_of_results_has_its_place_on_the_page() -> None:
    page = (DOCS / "data.md").read_text()
    named = re.findall(r"^<!-- output of python -m benchmarks.published (\S+) -->$", page, re.M)
    files = {path.name for path in published.RESULTS.glob("*.json")} - SHOWN_ELSEWHERE
    assert {*named} == files == {*published.PAGES}


@pytest.mark.parametrize("name", published.PAGES)
def test_what_is_shown_is_a_table(name: str) -> None:
    assert re.search(r"^\|.*\|\n\|[ :|-]+\|\n\|.*\d.*\|$", published.text(name), re.M)
