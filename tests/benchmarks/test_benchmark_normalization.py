"""benchmarks.normalization compares ours with torch's norms, in time and in gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import normalization

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


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
