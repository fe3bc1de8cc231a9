"""benchmarks.activations counts what is held, and fp16 halves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import activation_models, activation_report
from benchmarks import activations as benchmark

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PUBLISHED = json.loads((benchmark.RESULTS / "activations-cpu.json").read_text())


def test_the_published_run_was_whole_and_fp16_and_bf16_halve_both_models() -> None:
    assert [model["model"] for model in PUBLISHED["models"]] == [
        task.name for task in activation_models.TASKS
    ]
    for model in PUBLISHED["models"]:
        named = {row["mode"]: row for row in model["rows"]}
        assert [*named] == [*benchmark.MODES]
        assert all(row["off_line"] == 0 for row in model["rows"])
        for mode in ("fp16, FP16_Optimizer", "bf16, FP16_Optimizer"):
            assert named[mode]["per_sample"] <= 0.60 * named["fp32"]["per_sample"]
            assert named[mode]["largest_batch"] > 1.6 * named["fp32"]["largest_batch"]
        for row in model["rows"]:
            assert row["largest_batch"] == benchmark.largest_batch(row, PUBLISHED["budget"])


# --- A run, and what is said


@pytest.mark.slow
def test_a_quick_run_writes_json_and_picture_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "QUICK", activation_models.QUICK[1:])
    results = benchmark.main(["--device=cpu", "--quick", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "activations-cpu.json").read_text()) == results
    assert (tmp_path / "activations.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == activation_report.page(results) + "\n"
