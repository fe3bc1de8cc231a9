"""benchmarks.quality: which runs there are, what its table says, and the published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.quality_tasks import TASKS

pytestmark = [pytest.mark.cpu_only]

RESULTS = Path(quality.__file__).parent / "results" / "quality-cpu.json"
BASE, *OTHERS = quality.WAYS


@pytest.mark.slow
def test_a_quick_run_of_quality_trains_in_every_way_and_draws_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    results = quality.main(["--quick", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "quality-cpu.json").read_text()) == results
    assert (tmp_path / "quality-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert [(each["task"], each["dtype"]) for each in results["runs"]] == [
        (task, dtype) for task in ("digits", "decoder") for dtype in quality.DTYPES
    ]
    for each in results["runs"]:
        assert [*each["ways"]] == [*quality.WAYS]
        assert all(len(run["curve"]) == 4 for runs in each["ways"].values() for run in runs)
    # bfloat16 has the masters of float32 ones to the bit, and rounds ties otherwise.
    (digits, *_) = (each["ways"] for each in results["runs"] if each["dtype"] == "float16")
    assert digits["split masters"] == digits[BASE] != digits["no masters"]


def test_the_published_runs_are_whole() -> None:
    found = json.loads(RESULTS.read_text())["runs"]
    assert [(each["task"], each["dtype"]) for each in found] == [
        (task, dtype) for task in TASKS for dtype in quality.DTYPES
    ]
    for each in found:
        counts = [len(runs) for runs in each["ways"].values()]
        long = each["steps"] >= quality.LONG
        assert counts == ([3, 1, 1, 1, 1] if long else [5] * len(quality.WAYS))
    assert found[-1]["steps"] == 20_000


def test_no_way_is_recommended_that_leaves_the_band_of_seeds() -> None:
    """docs/memory.md recommends split masters, and bfloat16 moments with stochastic rounding."""
    for each in json.loads(RESULTS.read_text())["runs"]:
        known = [run["score"] for run in each["ways"][BASE]]
        for name in ("split masters", "split, bfloat16 moments, stochastic"):
            for run, base in zip(each["ways"][name], known, strict=False):
                assert abs(run["score"] - base) <= max(known) - min(known), (each["task"], name)
