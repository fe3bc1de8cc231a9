"""benchmarks.training: every way trains the same decoder, and learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training
from benchmarks.step_device import Cpu

SIZE = training.Size(32, 1, 2, 64, 8, 32, 1, 30)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LR", 1e-2)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", training.WAYS)
def test_each_way_starts_at_the_same_loss_and_learns(name: str) -> None:
    row = training.measure(name, SIZE, Cpu())
    # Of 64 tokens that are equally likely; and less, since nine of ten follow from the one before.
    assert row["loss0"] == pytest.approx(4.16, abs=0.05)
    assert row["loss_last5"] < 3.0
    assert 0 < row["optimizer_ms"] < row["step_ms"]
    assert not torch.is_autocast_enabled("cpu")


def test_a_run_writes_what_its_table_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(training.SIZES, "cpu", SIZE._replace(steps=2))
    arguments = ["--device=cpu", "--ways", "FP16_Optimizer", f"--results={tmp_path}"]
    results = training.main(arguments)
    assert json.loads((tmp_path / "training-cpu.json").read_text()) == results
    assert [row["case"] for row in results["rows"]] == ["ours FP16_Optimizer(FusedAdam)"]
    assert training.page(results) in capsys.readouterr().out
