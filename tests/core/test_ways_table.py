"""The table of ways is whole, and docs/works_with.md shows what they lack."""

from __future__ import annotations

from pathlib import Path

from way_runs import APIS
from ways import LACKS, WAYS, printed

ROOT = Path(__file__).parents[2]


def test_each_api_is_a_way_and_none_stands_twice() -> None:
    assert {way.api for way in WAYS} == {*APIS}
    assert len({*WAYS}) == len(WAYS)


def test_each_lack_is_that_of_a_way_and_another_way_has_it() -> None:
    for one in LACKS:
        assert any(map(one.is_of, WAYS)), one
        assert any(way.has(one.behaviour) for way in WAYS), one


def test_the_page_shows_what_ways_lack() -> None:
    assert printed() in (ROOT / "docs" / "works_with.md").read_text()
