"""benchmarks.activations counts what is held, and fp16 halves it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex_mp.amp import _current
from benchmarks import activation_models, activation_report, memory_probe
from benchmarks import activations as benchmark
from benchmarks.activation_models import Task

activation_chart = pytest.importorskip(
    "benchmarks.activation_chart", reason="the chart needs matplotlib", exc_type=ImportError
)

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

ROOT = Path(benchmark.__file__).resolve().parents[1]
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


def test_the_models_have_the_published_numbers_of_parameters(bert_base: nn.Module) -> None:
    assert sum(param.numel() for param in bert_base.bert.parameters()) == 109_482_240
    resnet = activation_models.ResNet()
    assert sum(param.numel() for param in resnet.parameters()) == 25_557_032


def test_a_position_attends_to_all_others() -> None:
    model = BERT.build().eval()
    ids = BERT.inputs(2)
    other = ids.clone()
    other[:, -1] = other[:, -1] % 99 + 1  # another word, and no padding
    assert not torch.equal(model(ids), model(other))


def test_resnet_makes_the_image_32_times_smaller() -> None:
    layers = [*activation_models.ResNet((1, 1, 1, 1), 4)]
    assert nn.Sequential(*layers[:-3])(torch.ones(2, 3, 64, 96)).shape == (2, 128, 2, 3)


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


def test_a_module_that_raises_leaves_no_hooks() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memory_probe.held_for_backward(lambda: nn.Linear(2, 2)(torch.ones(3)), [])
    assert memory_probe.held_for_backward(lambda: torch.ones(3).requires_grad_().sum(), []) == {}
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


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


def test_only_casts_inside_the_model_keep_copies_of_weights(rows: dict[Any, Any]) -> None:
    model = RESNET.build()
    in_half = sum(
        2 * layer.weight.numel()
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    )
    # Mean and deviation of each channel, in the dtype of the norm's parameters.
    channels = sum(n.num_features for n in model.modules() if isinstance(n, nn.BatchNorm2d))
    loss = 4  # the sum of the weights of all classes
    fixed = {mode: rows[RESNET.name, mode]["fixed"] for mode in benchmark.MODES}
    assert fixed == {
        "fp32": 2 * 4 * channels + loss,
        "fp16, FP16_Optimizer": 2 * 2 * channels + loss,
        "amp.init": 2 * 4 * channels + loss + in_half,
        "amp O1": 2 * 4 * channels + loss + in_half,
        "amp O2": 2 * 4 * channels + loss,
        "bf16, FP16_Optimizer": 2 * 2 * channels + loss,
    }


@pytest.mark.parametrize("mode", ["amp.init", "amp O1"])
def test_no_mode_leaves_casts_behind(mode: str, amp_off: None) -> None:
    benchmark.measure_mode(RESNET, mode, "cpu")
    assert _current.handle is None
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


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


# --- The largest batch


def row(**changes: Any) -> dict[str, Any]:
    state = {"weights": 40, "gradients": 40, "masters": 0, "moments": 80}
    whole = {"mode": "fp32", "state": state, "fixed": 10, "per_sample": 90, "inputs": 10}
    return whole | {"peak": None, "by_module": [], "off_line": 0} | changes


@pytest.mark.parametrize(
    ("budget", "batch"), [(0, 0), (170, 0), (269, 0), (270, 1), (369, 1), (370, 2), (10_170, 100)]
)
def test_the_largest_batch_fills_the_budget_and_no_more(budget: int, batch: int) -> None:
    assert benchmark.largest_batch(row(), budget) == batch


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GiB", 16 << 30), ("1.5 GB", 1_500_000_000), ("200 MiB", 200 << 20), ("1MB", 10**6)],
)
def test_a_budget_is_a_number_with_a_unit(text: str, expected: int) -> None:
    assert benchmark.parse_args(["--budget", text]).budget == expected


@pytest.mark.parametrize("text", ["16", "GiB", "0 GiB", "-1GiB", "16 gib", "many"])
def test_another_budget_is_refused_with_what_is_wanted(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is no size"):
        benchmark.size(text)
    with pytest.raises(SystemExit):
        benchmark.parse_args([f"--budget={text}"])
    assert "such as 16GiB" in capsys.readouterr().err


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


def test_a_bar_has_all_that_the_largest_batch_counts() -> None:
    one = row()
    batch = benchmark.largest_batch(one, 10_170)
    assert sum(activation_chart.parts(one, batch).values()) == 10_170
    assert activation_chart.parts(one, batch).keys() == activation_chart.PARTS.keys()


def test_the_table_says_what_was_measured() -> None:
    half = row(mode="fp16", fixed=0, per_sample=45_000_000, largest_batch=7)
    single = row(per_sample=90_000_000, fixed=1_000_000, largest_batch=3)
    model = {"model": "small", "parameters": 1_234_000, "rows": [single, half]}
    title, _, head, _, *lines = activation_report.table(model, 16 << 30).splitlines()
    assert title == "small: 1.23 M parameters"
    assert head.split("|")[-2].strip() == "batch in 16 GiB"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [each[0] for each in cells] == ["fp32", "fp16"]
    assert [each[-4:] for each in cells] == [
        ["1.0", "90.0", "1.00", "3"],
        ["", "45.0", "0.50", "7"],
    ]
    assert activation_report.finding(model) == "- small: a batch of 3 in fp32, 7 (fp16)"
    assert "fp16 holds 0.50" in activation_report.finding_in_short(model)
