"""docs/rnn.md: its code runs, and carries weights over to torch.nn."""

from __future__ import annotations

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


def test_the_state_goes_on_in_torch() -> None:
    there = of_sizes(RNN.LSTM(3, 5, 2))
    exec(ONE_DIRECTION, there)
    there["chunks"] = torch.randn(3, 6, 2, 3)
    exec(STATE, there)
    for chunk in there["chunks"]:
        expected, _ = there["old"](chunk)
    torch.testing.assert_close(there["output"], expected)
