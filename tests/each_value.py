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


def values_of(case: Any) -> set[tuple[str, ...]]:
    """Return the name and the text of each parameter of a case.

    A value with `parts` has each of them, and the first one beside each other parameter.
    """
    callspec = getattr(case, "callspec", None)
    params = callspec.params if callspec else {}
    values: set[tuple[str, ...]] = {(name, str(value)) for name, value in params.items()}
    for name, value in params.items():
        if not hasattr(value, "parts"):
            continue
        values = {each for each in values if each[0] != name}
        values |= {(*each, value.parts[0]) for each in values}
        values |= {(name, part) for part in value.parts}
    return values
