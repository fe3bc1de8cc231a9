"""The code in README.md runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

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
def test_the_loop_with_grad_scaler_runs_and_learns():
    (code,) = blocks("python")
    there = names(torch.float32)
    exec(code.replace("lr=1e-3", "lr=0.1"), there)
    assert is_learnt(there)
