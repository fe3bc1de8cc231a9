"""fairseq 0.9.0: half(), its own FP16Optimizer and FusedAdam, apex's kernel and FusedLayerNorm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import checkpoint, run, write_sentences

ON_CPU = "--device cpu --modernize"
MODEL = (
    "--arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 "
    "--decoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0"
)
TRAINING = (
    "--optimizer adam --lr 0.003 --max-sentences 32 --criterion cross_entropy --seed 1 "
    "--log-format json --log-interval 1000 --no-epoch-checkpoints"
)
EPOCHS = 4
# 6 seeds, 8 epochs: 0.005 at the most. A learning rate that is a fifth larger: see docs/clients.md.
BAND = 0.015


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training printed, and its last checkpoint."""

    output: str
    checkpoint: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        """Mean training losses of the epochs, in bits."""
        lines = [line for line in self.output.splitlines() if line.startswith('{"epoch"')]
        reports = [json.loads(line) for line in lines]
        return [float(report["train_loss"]) for report in reports if "train_loss" in report]


class Fairseq:
    """Data in a folder, and trainings on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_sentences(folder)
        words = (
            f"{ON_CPU} -m fairseq_cli.preprocess --source-lang src --target-lang tgt "
            "--trainpref train --validpref valid --destdir bin --workers 1"
        )
        run(folder, *words.split())

    def train(self, name: str, options: str, epochs: int = EPOCHS, flags: str = ON_CPU) -> Run:
        words = (
            f"{flags} -m fairseq_cli.train bin {MODEL} {TRAINING} "
            f"--save-dir {name} --max-epoch {epochs} {options}"
        )
        output = run(self.folder, *words.split())
        path = self.folder / name / "checkpoint_last.pt"
        return Run(output, checkpoint(path))


@pytest.fixture(scope="module")
def fairseq(tmp_path_factory: pytest.TempPathFactory) -> Fairseq:
    return Fairseq(tmp_path_factory.mktemp("fairseq"))


@pytest.fixture(scope="module")
def fp16(fairseq: Fairseq) -> Run:
    return fairseq.train("fp16", "--fp16")


def state_of(run: Run) -> dict[str, Any]:
    """Return Adam's state: all parameters are one to fairseq's FP16Optimizer."""
    (state,) = run.checkpoint["last_optimizer_state"]["state"].values()
    found: dict[str, Any] = state
    return found


def test_fp16_trains_as_fp32_with_fairseqs_own_adam_does(fairseq: Fairseq, fp16: Run) -> None:
    # Without --device cpu there is no GPU, and so neither FusedAdam nor FusedLayerNorm.
    fp32 = fairseq.train("fp32", "", flags="--modernize")
    assert len(fp16.losses) == EPOCHS
    assert fp16.losses[-1] < 0.5 * fp16.losses[0]
    assert fp16.losses == pytest.approx(fp32.losses, abs=BAND)


def test_fairseq_takes_the_adam_kernel_and_the_layer_norm_of_apex(fp16: Run) -> None:
    assert "FusedLayerNorm((32,)" in fp16.output
    assert {weight.dtype for weight in fp16.checkpoint["model"].values()} == {torch.float16}
    (history,) = fp16.checkpoint["optimizer_history"]
    assert history["optimizer_name"] == "FP16Optimizer"
    # Only its FusedAdam has them.
    (group,) = fp16.checkpoint["last_optimizer_state"]["param_groups"]
    assert {"bias_correction", "max_grad_norm"} <= group.keys()


def test_a_run_in_two_parts_goes_on_with_the_moments(fairseq: Fairseq, fp16: Run) -> None:
    first = fairseq.train("parts", "--fp16", epochs=EPOCHS // 2)
    second = fairseq.train("parts", "--fp16")
    assert "loaded checkpoint parts/checkpoint_last.pt" in second.output
    # Not to the bit: fairseq saves no masters, and makes new ones of the half weights.
    assert first.losses == fp16.losses[: EPOCHS // 2]
    assert second.losses == pytest.approx(fp16.losses[EPOCHS // 2 :], abs=BAND)
    assert state_of(second)["step"] == state_of(fp16)["step"] == 2 * state_of(first)["step"]
    for name in ("exp_avg", "exp_avg_sq"):
        error = (state_of(second)[name] - state_of(fp16)[name]).norm()
        assert error < 0.2 * state_of(fp16)[name].norm(), name
