"""The code in README.md runs."""

from __future__ import annotations

import argparse
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from apex_mp import amp
from apex_mp.optimizers import FP16_Optimizer

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


class Classifier(torch.nn.Linear):
    """Returns the loss if it is given labels, as the models of 2019 did."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(inputs)
        return logits if labels is None else torch.nn.functional.cross_entropy(logits, labels)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def names(dtype: torch.dtype, loss_scale: float = 0.0) -> dict[str, Any]:
    """What stands around the snippets: a model, groups, and batches it can learn."""
    model = Classifier(4, 2)
    inputs = torch.randn(8, 4)
    labels = (inputs[:, 0] > 0).long()
    return {
        "torch": torch,
        "device": "cpu",
        "model": model,
        "optimizer_grouped_parameters": [{"params": [p]} for p in model.parameters()],
        "args": argparse.Namespace(learning_rate=0.1, loss_scale=loss_scale),
        "train_dataloader": [(inputs.to(dtype), labels)] * 20,
        "t_total": 20,
        "warmup_linear": lambda x: 1.0 - x,
        "inputs": inputs,
        "labels": labels,
    }


def is_learnt(after: dict[str, Any]) -> bool:
    guesses = after["model"].float()(after["inputs"]).argmax(1)
    return bool((guesses == after["labels"]).all())


@pytest.mark.cpu_only
@pytest.mark.parametrize("loss_scale", [0.0, 128.0])
def test_the_loop_of_2019_runs_and_learns_after_its_import_is_replaced(loss_scale):
    (diff,) = blocks("diff")
    code = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    there = names(torch.float16, loss_scale)
    exec(code, there)
    assert is_learnt(there)
    assert there["optimizer"].dynamic_loss_scale == (loss_scale == 0.0)


@pytest.mark.cpu_only
def test_the_float16_loop_of_the_first_screen_runs_as_pasted_and_learns():
    code = blocks("python")[0]
    assert README.index(code) < README.index("\n## ")
    torch.manual_seed(0)
    there: dict[str, Any] = {}
    exec(code, there)
    guesses = there["model"](there["x"].half()).argmax(1)
    assert (guesses == there["y"]).float().mean().item() > 0.95
    assert {param.dtype for param in there["model"].parameters()} == {torch.float16}
    assert not there["scaler"].step_was_skipped(there["optimizer"])


@pytest.mark.cpu_only
@pytest.mark.usefixtures("amp_off")
def test_the_amp_loop_runs_as_pasted_and_trains_float32_weights_in_float16():
    code = blocks("python")[1]
    torch.manual_seed(0)
    there: dict[str, Any] = {}
    exec(code, there)
    assert there["amp_handle"].is_active()
    assert there["model"](there["inputs"]).dtype == torch.float16
    (steps,) = {state["step"].item() for state in there["optimizer"].state.values()}
    assert steps == 20  # None was skipped.
    assert {param.dtype for param in there["model"].parameters()} == {torch.float32}


@pytest.mark.cpu_only
@pytest.mark.usefixtures("amp_off")
def test_the_registered_functions_run_in_the_precision_they_ask_for():
    code = blocks("python")[2]
    there: dict[str, Any] = {"amp": amp, "torch": torch}
    exec(textwrap.dedent(code), there)
    amp.init(device_type="cpu")
    half, full = torch.ones(4).half(), torch.ones(4, 4)
    assert there["normalise"](half).dtype == torch.float32
    assert torch.sigmoid(half).dtype == torch.float32
    assert torch.einsum("ij,jk->ik", full, full).dtype == torch.float16


@pytest.mark.cpu_only
def test_the_callback_is_told_of_a_skipped_step(capsys):
    logger = logging.getLogger("apex_mp")
    before = [*logger.handlers]
    try:
        exec(blocks("python")[3], {})
        overflow()
    finally:
        logger.handlers[:] = before
    assert capsys.readouterr().out.splitlines()[-1] == "loss scale: 8.0"


def overflow() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=0.1), dynamic_loss_scale=True)
    optimizer.loss_scale = 16.0
    optimizer.backward(weight.sum().float() * float("inf"))
    optimizer.step()
