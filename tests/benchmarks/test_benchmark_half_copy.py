"""benchmarks.half_copy measures what a half copy written by the step would save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import half_copy

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
