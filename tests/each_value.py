"""Which cases of a test function run: a few that have each value of each parameter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

AT_LEAST = 4  # cases of a function that has more


def cases_with_each_value(cases: Iterable[Any]) -> list[Any]:
    """Return the items of one function that have each value of each parameter.

    Again and again the case with the most values that none has yet, and among these the one with
    the most new pairs of values; until every value is there, and `AT_LEAST` cases or every pair.
    """
    # Shuffled: among equals the first is taken, which in order would be a list without tensors.
    left = {case: values_of(case) for case in cases}
    left = {case: left[case] for case in random.Random(0).sample([*left], len(left))}
    values = set[Any]().union(*left.values())
    pairs = set[Any]().union(*map(pairs_of, left.values()))
    chosen: list[Any] = []
    while values or (pairs and len(chosen) < AT_LEAST):
        best = max(left, key=lambda case: news(left[case], values, pairs))
        values -= left[best]
        pairs -= pairs_of(left.pop(best))
        chosen.append(best)
    return chosen or [*left]


def values_of(case: Any) -> set[tuple[str, str]]:
    """Return the name and the text of each parameter of a case."""
    callspec = getattr(case, "callspec", None)
    return {(name, str(value)) for name, value in callspec.params.items()} if callspec else set()


def pairs_of(values: set[Any]) -> set[frozenset[Any]]:
    return {frozenset(pair) for pair in itertools.combinations(values, 2)}


def news(of_case: set[Any], values: set[Any], pairs: set[Any]) -> tuple[int, int]:
    """Return how many values, and pairs of values, a case has that are not covered yet."""
    return len(of_case & values), len(pairs_of(of_case) & pairs)
