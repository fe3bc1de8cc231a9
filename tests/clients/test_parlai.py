"""ParlAI 1.0.0: half() and fp16_utils.FP16_Optimizer around torch's Adam."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import checkpoint, mean, run

OPTIONS = "--device cpu --modernize"
COMMAND = f"{OPTIONS} -m parlai train_model"
TASK = "-t integration_tests:nocandidate --datapath data --datatype train:ordered"
MODEL = "-m transformer/generator --n-layers 1 --n-heads 1 --ffn-size 32 --embedding-size 32"
# --log-every-n-secs: every step. --force-fp16-tokens: fp32 has the words that fp16 adds, too.
TRAINING = (
    "--optimizer adam --learningrate 0.002 --batchsize 16 --inference greedy --beam-size 1 "
    "--log-every-n-secs 1e-6 --force-fp16-tokens true"
)
FP16 = "--fp16 true --fp16-impl apex"
# ParlAI takes no seed. So all start from one model, that of a single step. That one has a seed: the
# first gradients of some do not fit float16 at the scale that ParlAI starts with.
SEEDED = """
import runpy
import torch

torch.manual_seed(1)
runpy.run_module("parlai", run_name="__main__", alter_sys=True)
"""
FROM_BASE = "--init-model base"
LAST = 10  # steps whose losses are averaged
# 6 first models: 0.004 at the most.
BAND = 0.02


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training printed and noted, and the model at its end."""

    output: str
    reports: list[dict[str, Any]]
    model: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [report["loss"] for report in self.reports]


def train(folder: Path, name: str, options: str, epochs: float, command: str = COMMAND) -> Run:
    words = f"{command} {TASK} {MODEL} {TRAINING} -mf {name} --num-epochs {epochs} {options}"
    output = run(folder, *words.split())
    notes = json.loads((folder / f"{name}.trainstats").read_text())
    return Run(output, notes["train_reports"], checkpoint(folder / name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parlai")
    (folder / "seeded.py").write_text(SEEDED)
    train(folder, "base", "", epochs=0.03, command=f"{OPTIONS} seeded.py train_model")
    return folder


@pytest.fixture(scope="module")
def fp16(folder: Path) -> Run:
    return train(folder, "fp16", f"{FP16} {FROM_BASE}", epochs=1)


@pytest.fixture(scope="module")
def reloaded(folder: Path, fp16: Run) -> Run:
    return train(folder, "fp16", FP16, epochs=2)


@pytest.fixture(scope="module")
def fp32(folder: Path) -> Run:
    return train(folder, "fp32", FROM_BASE, epochs=2)


def step_of(run: Run) -> int:
    """Return how many steps Adam has taken."""
    return int(run.model["optimizer"]["optimizer_state_dict"]["state"][0]["step"])


def test_fp16_trains_as_fp32_does(fp16: Run, fp32: Run) -> None:
    until = len(fp16.losses)
    assert mean(fp16.losses[-LAST:]) < 0.8 * fp16.losses[0]
    assert mean(fp16.losses[-LAST:]) == pytest.approx(
        mean(fp32.losses[until - LAST : until]), abs=BAND
    )


def test_clip_master_grads_measures_unscaled_gradients(fp16: Run, fp32: Run) -> None:
    norms, others = ([report["gnorm"] for report in run.reports[:LAST]] for run in (fp16, fp32))
    # 5 first models: 0.6 % at the most.
    assert norms == pytest.approx(others, rel=0.03)


def test_the_model_file_holds_half_weights_their_masters_and_the_scale(fp16: Run) -> None:
    saved = fp16.model["optimizer"]
    weights = [weight for weight in fp16.model["model"].values() if weight.is_floating_point()]
    assert {weight.dtype for weight in weights} == {torch.float16}
    (masters,) = saved["fp32_from_fp16"]
    assert {master.dtype for master in masters} == {torch.float32}
    assert fp16.reports[-1]["fp16_loss_scalar"] == saved["loss_scaler"]["cur_scale"]
    assert saved["loss_scaler"]["cur_iter"] == len(fp16.losses)


def test_a_reloaded_model_goes_on_with_its_moments(fp16: Run, reloaded: Run, fp32: Run) -> None:
    assert "Loading existing model params from fp16" in reloaded.output
    more = reloaded.reports[len(fp16.reports) :]
    assert more[0]["total_train_updates"] == len(fp16.reports) + 1
    # ParlAI itself starts a new scale, and clip_master_grads returns -1 for what overflows.
    skipped = [report["gnorm"] for report in more].count(-1.0)
    assert step_of(reloaded) == step_of(fp16) + len(more) - skipped
    assert mean([report["loss"] for report in more[:LAST]]) < mean(fp16.losses[-LAST:])
    # The data come in another order than in a run of two epochs: 3 first models, 0.04.
    assert mean(reloaded.losses[-LAST:]) == pytest.approx(mean(fp32.losses[-LAST:]), abs=0.1)
