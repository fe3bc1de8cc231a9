"""benchmarks.inference reads digits with rounded weights."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn

from benchmarks import inference

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def test_reading_rounds_a_copy_and_counts_weights_and_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count, found, labels = inference.read(model, torch.float16)
    # Four values of each channel in the norm, and how many batches it has seen.
    assert count == 2 * (64 * 10 + 10 + 4 * 10) + 8
    assert found.shape == labels.shape == (450,)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_quick_run_of_inference_measures_both_networks_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "MODELS", dict([*inference.MODELS.items()][:1]))
    results = inference.main(["--quick", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "inference-cpu.json").read_text()) == results
    assert capsys.readouterr().out == inference.page(results) + "\n"
    (model,) = results["models"]
    assert [row["weights"] for row in model["rows"]] == [*inference.DTYPES]
    assert model["rows"][0]["changed"] == [0]
    assert model["rows"][0]["accuracy"][0] > 0.5  # It has learnt; chance is 0.1.


def test_in_the_published_figures_half_the_bytes_read_as_well() -> None:
    results = json.loads((inference.RESULTS / "inference-cpu.json").read_text())
    assert [model["model"] for model in results["models"]] == [*inference.MODELS]
    for model in results["models"]:
        whole, *rounded = model["rows"]
        assert mean(whole["accuracy"]) > 0.95
        for row in rounded:
            assert row["bytes"] <= 0.51 * whole["bytes"]
            assert mean(row["accuracy"]) == pytest.approx(mean(whole["accuracy"]), abs=0.005)
