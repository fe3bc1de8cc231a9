"""A quick run of benchmarks.monitor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import monitor

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def test_a_quick_run_of_monitor_measures_everything_and_writes_it(tmp_path: Path) -> None:
    results = monitor.main(["--device=cpu", "--rounds=2", "--quick", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "monitor-cpu.json").read_text()) == results
    assert list(results["run"]["ms"]) == [monitor.PASSES, *monitor.TIMED]
    assert all(ms > 0 for ms in results["run"]["ms"].values())


def test_the_published_share_of_training_is_what_the_page_says() -> None:
    results = json.loads((monitor.RESULTS / "monitor-cpu.json").read_text())
    _, of_training, _ = monitor.shares(results["run"])
    assert of_training < 0.02  # What the page says.
