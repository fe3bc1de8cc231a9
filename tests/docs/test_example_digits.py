"""examples/digits: its flags train, what it measures is right, and its page shows its figures."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "digits"
RESULTS = ROOT / "benchmarks" / "results" / "digits-cpu.json"

# Not imported here: each process that collects tests would wait for it.
NEEDED = ("sklearn", "matplotlib", "tqdm")
IS_THERE = all(importlib.util.find_spec(name) for name in NEEDED)
pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not IS_THERE, reason='the example needs pip install -e ".[examples]"'),
]


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
        pytest.param("--fp16", marks=pytest.mark.slow),
        pytest.param("--fp16 --loss_scale 128", marks=pytest.mark.slow),
        pytest.param("--amp", marks=pytest.mark.slow),
        pytest.param("--bf16", marks=pytest.mark.slow),
        pytest.param("--optimizer adamw", marks=pytest.mark.slow),
        "--optimizer adamw --fp16",
        pytest.param("--optimizer adamw --amp", marks=pytest.mark.slow),
        pytest.param("--optimizer sgd --fp16 --loss_scale 128", marks=pytest.mark.slow),
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
