"""docs/rnn.md: its code runs, and carries weights over to torch.nn."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from apex_mp import RNN

pytestmark = pytest.mark.cpu_only

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rnn.md").read_text()
LOOP, ONE_DIRECTION, TWO_DIRECTIONS, STATE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_loop_runs() -> None:
    there: dict[str, Any] = {}
    exec(LOOP, there)
    assert there["output"].shape == (35, 8, 128)
    assert there["h"].shape == there["c"].shape == (2, 8, 128)
    assert all(param.grad.any() for param in there["model"].parameters())


def of_sizes(old: Any) -> dict[str, Any]:
    return {"torch": torch, "old": old, "input_size": 3, "hidden_size": 5, "num_layers": 2}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "Tanh"])
def test_a_trained_layer_goes_on_in_torch(kind: str) -> None:
    there = of_sizes(getattr(RNN, kind)(3, 5, 2))
    exec(ONE_DIRECTION.replace("LSTM", kind.replace("Tanh", "RNN")), there)
    x = torch.randn(6, 2, 3)
    torch.testing.assert_close(there["new"](x)[0], there["old"](x)[0])


def test_two_directions_go_on_in_torch() -> None:
    there = of_sizes(RNN.LSTM(3, 5, 2))
    exec(ONE_DIRECTION, there)  # Which has the names.
    there["old"] = RNN.LSTM(3, 5, 1, bidirectional=True)
    exec(TWO_DIRECTIONS, there)
    x = torch.randn(6, 2, 3)
    torch.testing.assert_close(there["new"](x)[0], there["old"](x)[0])


def test_the_state_goes_on_in_torch() -> None:
    there = of_sizes(RNN.LSTM(3, 5, 2))
    exec(ONE_DIRECTION, there)
    there["chunks"] = torch.randn(3, 6, 2, 3)
    exec(STATE, there)
    for chunk in there["chunks"]:
        expected, _ = there["old"](chunk)
    torch.testing.assert_close(there["output"], expected)


def test_the_names_are_there() -> None:
    section = PAGE.split("## The names\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert len(rows) == 8
    for row in rows:
        home = "apex_mp.RNN"
        for said in re.findall(r"`([\w.]+)`", row):
            path, _, name = said.rpartition(".")
            home = f"apex_mp.{path}" if path else home
            assert hasattr(importlib.import_module(home), name), said


def test_the_signature_is_that_of_the_page() -> None:
    said = re.search(r"take `\((input_size.*?)\)`", PAGE, re.DOTALL)
    assert said is not None
    model = eval(f"lambda {said[1]}: locals()".replace("\n", " "))(1, 2, 3)
    for kind in ("LSTM", "GRU", "ReLU", "Tanh", "mLSTM"):
        parameters = inspect.signature(getattr(RNN, kind)).parameters.values()
        empty = [p.name for p in parameters if p.default is p.empty]
        assert empty == [*model][:3]
        assert {p.name: p.default for p in parameters if p.name not in empty} == {
            name: value for name, value in model.items() if name not in empty
        }
