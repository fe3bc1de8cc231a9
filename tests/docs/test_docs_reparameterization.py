"""docs/reparameterization.md: its code runs, and torch's weight norm goes on from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.cpu_only

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reparameterization.md").read_text()
FIRST, OWN, ON_TO_TORCH = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_example_has_the_parameters_that_the_page_says() -> None:
    there: dict[str, Any] = {}
    exec(FIRST, there)
    names = dict(there["model"].named_parameters())
    assert {"0.weight", "1.weight_hh_l0_g", "1.weight_hh_l0_v"} <= set(names)
    assert "1.weight_hh_l0" not in names
    there["remove_weight_norm"](there["model"])
    assert "1.weight_hh_l0" in there["model"].state_dict()


def test_the_class_of_the_page_computes_the_weight_as_it_was() -> None:
    there: dict[str, Any] = {}
    exec(FIRST + "torch.manual_seed(0)\n" + OWN, there)
    torch.manual_seed(0)
    torch.testing.assert_close(there["layer"].weight, nn.Linear(6, 5).weight)
    assert [*there["layer"].state_dict()] == ["bias", "weight_log", "weight_rest"]
