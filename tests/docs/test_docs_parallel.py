"""docs/parallel.md: its loops train, and the names and arguments are those that are there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex_mp.parallel import DistributedDataParallel

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off", "one_process")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "parallel.md").read_text()
BEFORE, ACCUMULATING, _, _, AFTER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def learnable() -> dict[str, Any]:
    torch.manual_seed(0)
    inputs = torch.randn(8, 4)
    labels = (inputs[:, 0] > 0).long()
    model = nn.Linear(4, 2)
    start = model.weight.detach().clone()
    there = {"torch": torch, "device": "cpu", "model": model, "start": start}
    return {**there, "train_dataloader": [(inputs, labels)] * 40}


def test_the_loops_before_and_after_end_with_the_same_weights() -> None:
    before, after = learnable(), learnable()
    # No step is skipped, as the scale begins where nothing overflows.
    begins = "dynamic_loss_scale=True, dynamic_loss_args={'init_scale': 128.0}"
    exec(BEFORE.replace("dynamic_loss_scale=True", begins), before)
    exec(AFTER, after)
    weights = [each["model"].module.weight.float() for each in (before, after)]
    way = (weights[1] - after["start"]).norm()
    assert (weights[0] - weights[1]).norm() < 0.01 * way
    assert way > 0.1
    assert before["model"].state_dict().keys() == after["model"].state_dict().keys()


def test_every_argument_has_its_row() -> None:
    section = PAGE.split("## The arguments of DistributedDataParallel\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    said = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(said) == sorted([*inspect.signature(DistributedDataParallel).parameters][1:])


def test_the_names_of_torch_are_there() -> None:
    for path in set(re.findall(r"`(torch\.[\w.]+)", PAGE)):
        module, _, name = path.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, cls = module.rpartition(".")
            owner = getattr(importlib.import_module(module), cls)
        assert hasattr(owner, name) or importlib.import_module(path), path
