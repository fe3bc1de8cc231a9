"""docs/reparameterization.md: its code runs, and torch's weight norm goes on from it."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex_mp import reparameterization

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


def test_torchs_weight_norm_goes_on_with_what_was_trained() -> None:
    new = nn.Sequential(nn.Conv1d(4, 6, 1), nn.LSTM(3, 5))
    old = reparameterization.apply_weight_norm(copy.deepcopy(new))
    with torch.no_grad():
        for param in old.parameters():
            param.add_(torch.rand_like(param))
    there: dict[str, Any] = {"old": old, "new": new}
    exec(ON_TO_TORCH, there)
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(new(x)[0], old(x)[0], rtol=0, atol=0)


def test_the_signatures_are_those_of_the_page() -> None:
    section = PAGE.split("## The names\n")[1].split("\n## ")[0]
    names = set(re.findall(r"^\| `(\w+)", section, re.MULTILINE))
    assert names == set(reparameterization.__all__)
    for name, said in re.findall(r"^\| `(\w+)\((.*?)\)`", section, re.MULTILINE):
        function = getattr(reparameterization, name)
        params = inspect.signature(function, eval_str=True).parameters.values()
        shown = ", ".join(
            param.name
            + {inspect.Parameter.empty: ""}.get(
                param.default, f"={getattr(param.default, '__name__', repr(param.default))}"
            )
            for param in params
        )
        assert said == shown.replace("'", '"').replace(
            "reparameterization=None", "reparameterization"
        )
