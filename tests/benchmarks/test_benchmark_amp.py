"""benchmarks.amp measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from apex_mp.amp.casts import current as _current
from benchmarks import amp as benchmark

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "amp-cpu.json"

pytestmark = [
    pytest.mark.any_torch,
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("amp_off"),
]


@pytest.mark.slow
def test_a_quick_run_of_amp_times_every_model_in_every_way_and_writes_it(tmp_path, capsys):
    path = tmp_path / "amp.json"
    results = benchmark.main(
        ["--device=cpu", "--dtypes", "bf16", "--rounds=1", "--save-results", str(path)]
    )
    assert json.loads(path.read_text()) == results
    assert [row["model"] for row in results["rows"]] == [w.name for w in benchmark.WORKLOADS]
    for row in results["rows"]:
        # On a processor without AVX-512 oneDNN has no bf16 LSTM, so torch.autocast may have none.
        may_fail = {"torch.autocast"} if row["model"] == "LSTM" else set()
        assert set(row["failures"]) <= may_fail
        assert set(row["ms"]) == {*benchmark.contexts(torch.bfloat16, "cpu")} - set(row["failures"])
        assert all(ms > 0 for ms in row["ms"].values())
        expected = None
        if not row["failures"]:
            expected = pytest.approx(row["ms"]["amp.init"] / row["ms"]["torch.autocast"])
        assert row["ratio"]["amp.init / torch.autocast"] == expected
    assert benchmark.table(results) in capsys.readouterr().out
    assert _current.handle is None


def test_the_published_costs_are_within_five_percent_of_autocast():
    rows = json.loads(RESULTS.read_text())["rows"]
    ratios = [
        row["ratio"]["amp.init / torch.autocast"]
        for row in rows
        if row["model"] in ("MLP", "ResNet block")
    ]
    assert len(ratios) == 4
    assert max(ratios) <= 1.05
    assert all(0.97 <= row["ratio"]["NoOpHandle / fp32"] <= 1.03 for row in rows)
