"""A run has few cases of a test function, and among them each value of each parameter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from each_value import cases_with_each_value

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


class Case:
    def __init__(self, **params: Any) -> None:
        self.callspec = SimpleNamespace(params=params)


def params_of(cases: list[Any]) -> list[dict[str, Any]]:
    return [case.callspec.params for case in cases]


def test_each_value_is_in_one_case_and_no_case_is_superfluous() -> None:
    values = {
        "size": range(20),
        "dtypes": [("a", "b"), ("b", "a"), ("a", "a")],
        "on": [True, False],
    }
    cases = [
        Case(**dict(zip(values, row, strict=True))) for row in itertools.product(*values.values())
    ]
    chosen = params_of(cases_with_each_value(cases))
    assert len(chosen) == 20
    for name, wanted in values.items():
        assert {case[name] for case in chosen} == {*wanted}


def test_a_case_that_no_other_has_a_value_of_is_chosen_wherever_it_stands() -> None:
    for place in range(10):
        cases = [Case(a="usual", b=number % 2) for number in range(9)]
        cases.insert(place, Case(a="rare", b=0))
        assert "rare" in [case["a"] for case in params_of(cases_with_each_value(cases))]
