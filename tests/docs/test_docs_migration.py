"""docs/migration.md: its loops train, from the old names to torch.amp; what it names is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex_mp._as_apex import eras

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text()
_, BEFORE, AFTER, GO_ON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def learnable() -> dict[str, Any]:
    torch.manual_seed(0)
    inputs = torch.randn(8, 4)
    labels = (inputs[:, 0] > 0).long()
    model = nn.Linear(4, 2)
    return {
        "torch": torch,
        "device": "cpu",
        "model": model,
        "start": model.weight.detach().clone(),
        "train_dataloader": [(inputs, labels)] * 40,
    }


def test_the_loops_before_and_after_end_with_the_same_weights() -> None:
    before, after = learnable(), learnable()
    exec(BEFORE, before)
    before["amp_handle"]._deactivate()
    exec(AFTER, after)
    way = (after["model"].weight - after["start"]).norm()
    assert (before["model"].weight - after["model"].weight).norm() < 0.02 * way
    assert way > 0.1


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_new_imports_import() -> None:
    said = [new for _, new in rows("Old import, new import")]
    found = [
        (module, name.strip())
        for text in said
        for module, names in re.findall(r"from (apex_mp[\w.]*) import ([\w, ]+)", text)
        for name in names.split(",")
        if name.strip()
    ]
    assert len(found) > 8
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), (module, name)


def test_the_eras_of_pinned_commits_are_eras() -> None:
    said = {era.strip("`") for _, _, era, _ in rows("By the commit that was pinned")}
    assert said == set(eras.ERAS)
