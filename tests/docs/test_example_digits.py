"""examples/digits: its flags train, what it measures is right, and its page shows its figures."""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "digits"
RESULTS = ROOT / "benchmarks" / "results" / "digits-cpu.json"

for module in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(module, reason='the example needs pip install -e ".[examples]"')

pytestmark = pytest.mark.cpu_only


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "digits")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "digits_report")


@pytest.fixture
def trained(digits: ModuleType) -> Any:
    def train(*flags: str) -> Any:
        args = digits.parse_args(["--epochs", "2", *flags, "--device", "cpu"])
        with digits.progress(0) as bar:
            return digits.train("a run", args, digits.load_data("cpu"), bar)

    return train


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fp16",
        "--fp16 --loss_scale 128",
        "--amp",
        "--bf16",
        "--optimizer adamw",
        "--optimizer adamw --fp16",
        "--optimizer adamw --amp",
        "--optimizer sgd --fp16 --loss_scale 128",
    ],
)
def test_two_epochs_get_eight_in_ten_digits_right(trained, flags):
    run = trained(*flags.split())
    assert run.accuracy > 0.8
    assert sum(run.losses[-10:]) < 0.5 * sum(run.losses[:10])


def test_a_scale_that_is_too_large_skips_steps_until_it_fits_and_names_the_parameter(
    trained, capsys
):
    run = trained("--fp16", "--scale_window", "1", "--max_batches", "15")
    assert run.skipped
    for step in run.skipped[:-1]:
        assert run.scales[step + 1] == run.scales[step] / 2
    assert "loss scale" in run.first_overflow
    assert " inf" in run.first_overflow
    assert "Grad overflow on iteration" in capsys.readouterr().out


def test_fp16_with_masters_takes_as_many_bytes_of_state_as_fp32(trained):
    # 4 + 4 + 4 + 4 against 2 + 2 + 4 + 4 + 4, and a step count for each of 12 tensors.
    single = trained("--max_batches", "1")
    half = trained("--max_batches", "1", "--fp16")
    assert single.state_bytes_per_param == pytest.approx(16.0, abs=0.01)
    assert half.state_bytes_per_param == pytest.approx(16.0, abs=0.01)


def test_bytes_held_for_backward_are_those_of_inputs_and_activations(monkeypatch):
    measure = load(monkeypatch, "digits_measure")
    model = torch.nn.Linear(8, 10)
    images = torch.rand(4, 8)
    # The input of the linear layer, the log-probabilities, the labels, the sum of their weights.
    expected = 4 * 8 * 4 + 4 * 10 * 4 + 4 * 8 + 4
    assert measure.bytes_held_for_backward(model, images) == expected


def test_every_precision_starts_from_the_same_weights_and_sees_the_same_batches(digits):
    args = digits.parse_args(["--seed", "3", "--epochs", "2"])
    first, second = [list(digits.batches(100, args)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.cat(first).bincount().tolist() == [2] * 100


def test_weights_decay_and_biases_and_norms_do_not(digits):
    model = digits.DigitsNet()
    optimizer = digits.build_optimizer(model, digits.parse_args([]))
    sizes = [
        (group["weight_decay"], {p.dim() for p in group["params"]})
        for group in optimizer.param_groups
    ]
    assert sizes == [(0.01, {2, 4}), (0.0, {1})]


@pytest.mark.slow
def test_compare_writes_table_picture_and_figures(tmp_path):
    figures = tmp_path / "new" / "figures.json"
    command = [sys.executable, "digits.py", "--compare", "--epochs", "1"]
    done = subprocess.run(
        [*command, "--max_batches", "3", "--save-results", str(figures)],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in ("fp32", "fp16 static", "fp16 dynamic", "fp16 amp", "bf16"):
        assert f"\n| {name} " in done.stdout
    # Short, and without a bar, where it is no terminal.
    assert done.stderr == ""
    assert done.stdout.startswith("Training 5 models from 1 seed on cpu:\n\n| run ")
    assert figures.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert [row["steps"] for row in json.loads(figures.read_text())["rows"]] == [3] * 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_skipped_step_is_told_above_the_bar_and_where_there_is_no_bar_not_at_all(
    digits, monkeypatch, terminal
):
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    log = logging.getLogger("apex_mp")
    monkeypatch.setattr(log, "level", log.level)

    def skip_a_step(name: str, args: Any, data: Any, bar: Any) -> None:
        bar.refresh()
        logging.getLogger("apex_mp.amp").warning("Gradient overflow, skipping update")
        sys.stderr.write("a warning\n")
        bar.update()

    monkeypatch.setattr(digits, "train", skip_a_step)
    args = ["--compare", "--device", "cpu", "--epochs", "1", "--max_batches", "1"]
    digits.compare(digits.parse_args(args))
    first, *_ = lines = screen.getvalue().rstrip("\n").split("\n")
    assert first == "Training 5 models from 1 seed on cpu:"
    # What a bar leaves on its line is wiped, up to the last carriage return.
    shown = [line.rpartition("\r")[2] for line in lines[1:]]
    if terminal:
        assert shown.pop().startswith("all: 100%")
        assert shown == ["Gradient overflow, skipping update", "a warning"] * 5
    else:
        assert shown == ["a warning"] * 5


def test_the_finding_is_computed_from_the_accuracies(report, results):
    worse = copy.deepcopy(results)
    for row in worse["rows"]:
        row["accuracy"] = [0.9] if row["run"] == "fp16 dynamic" else [0.98]
    assert "falls 8.0 points short of fp32: 90.0 % against 98.0 %" in report.finding(worse)


def test_in_the_published_figures_fp16_comes_within_a_point_of_fp32(results):
    mean = {row["run"]: sum(row["accuracy"]) / len(row["accuracy"]) for row in results["rows"]}
    assert len(results["rows"][0]["seeds"]) >= 5
    assert mean["fp16 static"] > mean["fp32"] - 0.01
    assert mean["fp16 dynamic"] > mean["fp32"] - 0.01
    assert mean["fp16 amp"] > mean["fp32"] - 0.01


def test_the_page_shows_the_published_table_and_notes(report, results):
    page = (ROOT / "docs" / "recipes" / "digits.md").read_text()
    for part in (report.table(results), report.notes(results)):
        assert part in page, f"docs/recipes/digits.md must hold what {RESULTS} says:\n{part}"
