"""A short run has few cases, and among them every pair of parameters that there is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from pairs import covering_every_pair

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


class Case:
    def __init__(self, **params: Any) -> None:
        self.callspec = SimpleNamespace(params=params)


def test_every_pair_of_parameters_and_of_members_of_tuples_is_covered() -> None:
    rows = [row for row in itertools.product("abcd", repeat=3) if row != ("a", "b", "c")]
    cases = [Case(lists=number, dtypes=row) for number in range(20) for row in rows]
    kept = covering_every_pair(cases)
    assert 20 * 4 <= len(kept) < len(cases) / 10

    def tuples(cases: list[Case]) -> set[Any]:
        values = [(c.callspec.params["lists"], *c.callspec.params["dtypes"]) for c in cases]
        return {
            (i, row[i], j, row[j]) for row in values for i, j in itertools.combinations(range(4), 2)
        }

    assert tuples(kept) == tuples(cases)


def test_what_has_no_parameters_is_kept() -> None:
    assert len(covering_every_pair([object()])) == 1
