"""A pytest plugin that leaves of each test function cases that cover every pair of parameters.

A parameter that is a tuple or a list counts by its members: a row of four dtypes is four
parameters. Pairs that no case has are not asked for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)  # of what -k leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in functions.values() for item in covering_every_pair(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def covering_every_pair(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return some of `cases`: again and again the one with most pairs not yet covered."""
    # Shuffled: among equals the first is taken, which in order would be a list without tensors.
    pairs = {case: pairs_of(case) for case in random.Random(0).sample(cases, len(cases))}
    wanted = set().union(*pairs.values())
    chosen = []
    while wanted:
        best = max(pairs, key=lambda case: len(pairs[case] & wanted))
        wanted -= pairs[best]
        chosen.append(best)
    return chosen


def pairs_of(case: pytest.Item) -> set[tuple[Any, Any]]:
    """Return all pairs of parameters, and of each with itself."""
    callspec = getattr(case, "callspec", None)
    members = sorted(flattened("", callspec.params)) if callspec else [("", "")]
    return set(itertools.combinations_with_replacement(members, 2))


def flattened(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, (dict, list, tuple)):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in named:
            yield from flattened(f"{name}.{key}", member)
    else:
        yield name, str(value)
