"""A pytest plugin for gpu_check: only tests that touch a device, a line of JSON for each report.

The lines are written as the tests run, so that a run that is killed leaves its part.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", required=True, help="the file for a line of JSON for every report")


def pytest_configure(config: pytest.Config) -> None:
    lines = Lines(Path(config.getoption("--lines")))
    config.pluginmanager.register(Worker(lines) if hasattr(config, "workerinput") else lines)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if "device" in getattr(item, "fixturenames", ()) or item.get_closest_marker("cuda_only")
    ]


class Lines:
    """Writes one line for each report, at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **facts: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    # A line without an outcome at the start and at the end of a test.
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(name=nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in ("call", "???") or not report.passed:  # "???": xdist, of a crash
            self.write_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.write_report(report)

    def write_report(self, report: Any) -> None:
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        seconds = getattr(report, "duration", 0.0)
        self.write(name=report.nodeid, outcome=outcome, seconds=seconds, text=text[-1000:])


class Worker:
    """In a process of xdist: ends it after an error from which its CUDA context cannot recover.

    Each later test in the process would fail with the same error. xdist starts another process.
    """

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        import torch

        if not report.failed or not torch.cuda.is_available():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            self.lines.write_report(report)
            os._exit(1)
