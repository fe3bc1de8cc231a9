"""A pytest plugin for gpu_check: a line of JSON for each report, and samples of the operator tests.

The lines are written as the tests run, so that a run that is killed leaves its part. A sample is
for tools under which all tests would take hours; it also takes the guards around tensors away.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# What a sample takes of tests/test_operators.py: in words, for the JSON, and the tests' beginnings.
SAMPLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "all operators": (
        "of each test the first and the last case for each list of the table (the last row of "
        "dtypes mixes all), or for each dtype where there are no lists; every combination of "
        "dtypes on one list; not the list of 5000 tensors, nor training over 300 steps",
        ("test_",),
    ),
    # racecheck knows shared memory alone, and only the sums of check_ and l2_norm_ use it.
    "operators with shared memory": (
        "the tests of check_ and l2_norm_, of each the first and the last case for each list of "
        "the table, or for each dtype where there are no lists; not the list of 5000 tensors",
        ("test_check_", "test_l2_norm_"),
    ),
}
WHOLE = "takes_any_dtypes"
LEFT_OUT = ("over_300_steps", "5000 of 3")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", required=True, help="the file for a line of JSON for every report")
    parser.addoption("--sample", choices=[*SAMPLES], help="which of the operator tests to run")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lines(Path(config.getoption("--lines"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample = config.getoption("--sample")
    if sample is None:
        return
    # What an operator reads beyond its tensor must be no memory of ours, or memcheck is content.
    op_cases: Any = importlib.import_module("op_cases")
    op_cases.GUARD = 0
    chosen = choose(items, SAMPLES[sample][1])
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)


def choose(items: Iterable[pytest.Item], beginnings: tuple[str, ...]) -> set[pytest.Item]:
    """Return what a sample takes: the first and the last item of each test, list and dtype."""
    rows: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.name.startswith(beginnings) and not any(part in item.name for part in LEFT_OUT):
            test = item.name.partition("[")[0]
            callspec = getattr(item, "callspec", None)
            varied = callspec.params if callspec else {}
            of = item.name if WHOLE in test else f"{varied.get('case')} {varied.get('dtype')}"
            rows[test, of].append(item)
    return {item for row in rows.values() for item in (row[0], row[-1])}


class Lines:
    """Writes one line for each report, at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def write(self, **facts: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(kind="started", name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.write_report("test", report, report.duration)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(kind="finished", name=nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.write_report("file", report, 0.0)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.write(kind="deselected", count=len(items))

    def write_report(self, kind: str, report: Any, seconds: float) -> None:
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        self.write(
            kind=kind, name=report.nodeid, outcome=outcome, seconds=seconds, text=text[-1000:]
        )
