"""Which cases of a test function run: a few that have each value of each parameter."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any


def cases_with_each_value(cases: Iterable[Any]) -> list[Any]:
    """Return the items of one function that have each value of each parameter.

    Again and again the case with the most values that no chosen case has.
    """
    # Shuffled: among equals the first is taken, which in order would be a list without tensors.
    cases = list(cases)
    values = {case: values_of(case) for case in random.Random(0).sample(cases, len(cases))}
    missing = set[Any]().union(*values.values())
    chosen: list[Any] = []
    while missing:
        chosen.append(max(values, key=lambda case: len(values[case] & missing)))
        missing -= values[chosen[-1]]
    return chosen or cases


def values_of(case: Any) -> set[tuple[str, str]]:
    """Return the name and the text of each parameter of a case; some values say their parts."""
    callspec = getattr(case, "callspec", None)
    return {
        (name, part)
        for name, value in (callspec.params.items() if callspec else ())
        for part in getattr(value, "parts", (str(value),))
    }
