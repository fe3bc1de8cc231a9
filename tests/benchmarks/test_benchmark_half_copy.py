"""Quick runs of benchmarks.half_copy, monitor and normalization."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import half_copy, monitor, normalization

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def test_a_quick_run_of_half_copy_measures_everything_and_writes_it(tmp_path: Path) -> None:
    size = ["--layers=1", "--width=64", "--tokens=4", "--rounds=2"]
    results = half_copy.main(["--device=cpu", *size, f"--results={tmp_path}"])
    assert json.loads((tmp_path / "half-copy-cpu.json").read_text()) == results
    (run,) = results["runs"]
    assert run["tokens"] == 16
    assert list(run["ms"]) == list(half_copy.TIMED)
    assert all(ms > 0 for ms in run["ms"].values())
    assert run["ms"]["iteration"] > run["ms"]["step"]


def test_a_quick_run_of_monitor_measures_everything_and_writes_it(tmp_path: Path) -> None:
    results = monitor.main(["--device=cpu", "--rounds=2", "--quick", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "monitor-cpu.json").read_text()) == results
    assert list(results["run"]["ms"]) == [monitor.PASSES, *monitor.TIMED]
    assert all(ms > 0 for ms in results["run"]["ms"].values())


def test_the_published_share_of_training_is_what_the_page_says() -> None:
    results = json.loads((monitor.RESULTS / "monitor-cpu.json").read_text())
    _, of_training, _ = monitor.shares(results["run"])
    assert of_training < 0.02  # What the page says.


def test_a_quick_run_of_normalization_measures_every_case_and_writes_it(tmp_path: Path) -> None:
    results = normalization.main(
        ["--device=cpu", "--shapes", "16x32", "--rounds=2", f"--results={tmp_path}"]
    )
    assert json.loads((tmp_path / "normalization-cpu.json").read_text()) == results
    assert len(results["runs"]) == len(normalization.CASES)
    for run in results["runs"]:
        assert (run["rows"], run["width"]) == (16, 32)
        for of in (*run["ms"].values(), *run["times_ours"].values()):
            assert "ours" in of
            assert all(value > 0 for value in of.values())
        assert run["times_ours"]["both"]["ours"] == 1.0
        assert ("torch" in run["off"]) == (not run["norm"].startswith("Mixed"))
        assert ("cast" in run["off"]) == (run["input"] != "fp32")
        # One rounding of the gradient of ours, in the weights' precision.
        assert run["off"]["ours"] < {"fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7}[run["weights"]]
