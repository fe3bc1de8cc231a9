"""docs/bf16.md: its block trains bfloat16 weights, with nothing lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu_only

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bf16.md").read_text()


def test_the_block_trains() -> None:
    torch.manual_seed(0)
    there: dict[str, Any] = {}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, there)
    assert there["loss"].item() < 0.69  # ln 2 is that of a guess.
    weight = there["model"].weight
    assert weight.dtype == torch.bfloat16
    assert not there["optimizer"].master(weight).equal(weight.float())
