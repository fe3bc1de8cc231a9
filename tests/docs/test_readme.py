"""The code of README.md, docs/amp.md and docs/old_scripts.md that needs a model of yours runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex_mp import amp

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def after(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


class Classifier(nn.Linear):
    """Returns the loss if it is given labels, as the models of 2019 did."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(inputs.to(self.weight.dtype))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


@pytest.fixture
def names() -> dict[str, Any]:
    """What the blocks take for granted: a model, groups, and batches it can learn."""
    torch.manual_seed(0)
    model = Classifier(4, 2)
    inputs = torch.randn(64, 4)
    labels = (inputs[:, 0] > 0).long()
    return {
        "model": model,
        "loss_of": lambda model, batch: model(*batch).float(),
        "batches": [(inputs, labels)] * 1500,
        "train_dataloader": [(inputs, labels)] * 20,
        "optimizer_grouped_parameters": [{"params": [p]} for p in model.parameters()],
        "args": argparse.Namespace(learning_rate=0.1, loss_scale=0.0),
        "t_total": 20,
        "warmup_linear": lambda x: 1.0 - x,
    }


def share_learnt(names: dict[str, Any]) -> float:
    inputs, labels = names["batches"][0]
    guesses = names["model"].float()(inputs).argmax(1)
    return (guesses == labels).float().mean().item()


def test_the_first_loop_prints_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    there: dict[str, Any] = {}
    exec(blocks("README.md", "python")[0], there)
    assert capsys.readouterr().out == blocks("README.md", "text")[0]
    assert {param.dtype for param in there["model"].parameters()} == {torch.float16}
    assert not there["scaler"].step_was_skipped(there["optimizer"])


def test_the_loop_with_another_import_trains_in_float16(names: dict[str, Any]) -> None:
    (diff,) = blocks("README.md", "diff")
    exec(after(diff), names)
    assert {param.dtype for param in names["model"].parameters()} == {torch.float16}
    assert share_learnt(names) > 0.9


@pytest.mark.usefixtures("amp_off")
def test_the_loop_of_amp_trains_float32_weights_in_float16(names: dict[str, Any]) -> None:
    exec(blocks("README.md", "python")[1], names)
    assert names["amp_handle"].is_active()
    assert names["model"](names["batches"][0][0]).dtype == torch.float16
    assert {param.dtype for param in names["model"].parameters()} == {torch.float32}
    assert share_learnt(names) > 0.9


@pytest.mark.parametrize("loss_scale", [0.0, 128.0])
def test_the_loop_of_2019_learns_after_its_import_is_replaced(
    loss_scale: float, names: dict[str, Any]
) -> None:
    names["args"].loss_scale = loss_scale
    (diff,) = blocks("docs/old_scripts.md", "diff")
    exec(after(diff), names)
    assert share_learnt(names) > 0.9
    assert names["optimizer"].dynamic_loss_scale == (loss_scale == 0.0)


@pytest.mark.usefixtures("amp_off")
def test_the_registered_functions_run_in_the_precision_they_ask_for() -> None:
    there: dict[str, Any] = {"amp": amp, "torch": torch}
    exec(blocks("docs/amp.md", "python")[1], there)
    amp.init(device_type="cpu")
    half, full = torch.ones(4).half(), torch.ones(4, 4)
    assert there["normalise"](half).dtype == torch.float32
    assert torch.sigmoid(half).dtype == torch.float32
    assert torch.einsum("ij,jk->ik", full, full).dtype == torch.float16
