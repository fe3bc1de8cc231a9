"""benchmarks.activations counts what is held, and fp16 halves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import activation_models, activation_report, memory_probe
from benchmarks import activations as benchmark
from benchmarks.activation_models import Task

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PUBLISHED = json.loads((benchmark.RESULTS / "activations-cpu.json").read_text())
BERT, RESNET = activation_models.QUICK


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (task.name, mode): benchmark.measure_mode(task, mode, "cpu")
        for task in activation_models.QUICK
        for mode in benchmark.MODES
    }


# --- The models


@pytest.fixture(scope="module")
def bert_base() -> nn.Module:
    (task,) = [each for each in activation_models.TASKS if each.name.startswith("BERT-base")]
    return task.build()


@pytest.mark.slow
def test_the_models_have_the_published_numbers_of_parameters(bert_base: nn.Module) -> None:
    assert sum(param.numel() for param in bert_base.bert.parameters()) == 109_482_240
    resnet = activation_models.ResNet()
    assert sum(param.numel() for param in resnet.parameters()) == 25_557_032


# --- What is counted


def test_each_storage_counts_once_and_what_is_known_does_not_count() -> None:
    linear, images = nn.Linear(4, 5, bias=False), torch.randn(3, 4)

    def forward() -> torch.Tensor:
        hidden = torch.tanh(linear(images))  # saved by tanh, and by its product with itself
        return (hidden * hidden.view(3, 5)).sum()

    held = memory_probe.held_for_backward(forward, [*linear.parameters(), images])
    assert held == {("loss", "float32"): 3 * 5 * 4}
    held = memory_probe.held_for_backward(forward, linear.parameters())
    assert held == {("loss", "float32"): 3 * 5 * 4, ("Linear", "float32"): 3 * 4 * 4}


STATE = {
    "fp32": (4, 4, 0, 8),
    "fp16, FP16_Optimizer": (2, 2, 4, 8),
    "amp.init": (4, 4, 0, 8),
    "amp O1": (4, 4, 0, 8),
    "amp O2": (2, 2 + 4, 4, 8),
    "bf16, FP16_Optimizer": (2, 2, 4, 8),
}


@pytest.mark.parametrize("mode", STATE)
def test_a_mode_holds_these_bytes_a_parameter(mode: str, rows: dict[Any, Any]) -> None:
    parameters = sum(param.numel() for param in BERT.build().parameters())
    state = rows[BERT.name, mode]["state"]
    per_parameter = [state[name] / parameters for name in memory_probe.HELD]
    # Step counts and, with O2, norms that stay in float32 where batch norms are; none here.
    assert per_parameter == pytest.approx(STATE[mode], abs=0.05)


@pytest.mark.parametrize("mode", benchmark.MODES)
@pytest.mark.parametrize("task", activation_models.QUICK, ids=lambda task: task.name)
def test_what_is_held_is_a_line_in_the_batch(task: Task, mode: str, rows: dict[Any, Any]) -> None:
    row = rows[task.name, mode]
    assert row["off_line"] == 0
    assert row["per_sample"] > 0
    assert row["fixed"] >= 0
    assert sum(each["bytes"] for each in row["by_module"]) == row["per_sample"]


# --- What it saves


@pytest.mark.slow
def test_fp16_holds_at_most_sixty_hundredths_of_the_bytes_of_fp32_of_bert_base(
    bert_base: nn.Module,
) -> None:
    ids, labels = torch.randint(1, 30522, (1, 128)), torch.zeros(1, dtype=torch.long)

    def held() -> int:
        return memory_probe.held_for_backward(
            lambda: nn.functional.cross_entropy(bert_base(ids).float(), labels),
            [*bert_base.parameters(), ids, labels],
        ).total()

    in_fp32 = held()
    bert_base.half()
    assert in_fp32 > 50e6
    assert held() <= 0.60 * in_fp32


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
