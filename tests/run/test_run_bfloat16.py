"""`run --dtype bfloat16`: whatever a script casts to float16 is bfloat16."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import apex_mp
from apex_mp._run import cpu
from apex_mp._run.bfloat16 import cast_instead
from apex_mp._run.replacements import Replacements
from apex_mp.fp16_utils import FP16_Optimizer, network_to_half

pytestmark = pytest.mark.cpu_only

BF16 = torch.bfloat16
ROWS = torch.ones(2, 3)


@pytest.fixture(params=[False, True])
def in_bfloat16(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without `--device cpu`, which replaces some of the same functions after it."""
    replacements = Replacements()
    cast_instead(replacements)
    if request.param:
        cpu.redirect(replacements)
    yield
    replacements.undo()
    apex_mp.uninstall_as_apex()
    assert ROWS.half().dtype == torch.float16


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_autocast(dtype: torch.dtype | None) -> None:
    with torch.autocast("cpu", dtype):
        assert nn.Linear(3, 2)(ROWS).dtype == BF16


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("era", ["2019-03", "2019-08", "2020"])
@pytest.mark.parametrize(
    ("level", "dtypes"),
    [("O1", (torch.float32, BF16)), ("O2", (BF16, torch.float32)), ("O3", (BF16, torch.float32))],
)
def test_levels_of_amp(level: str, dtypes: tuple[torch.dtype, ...], era: str) -> None:
    apex_mp.install_as_apex(era)
    model: Any = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initialize = importlib.import_module("apex.amp").initialize
    model, optimizer = initialize(model, optimizer, opt_level=level, verbosity=0)
    assert (model.weight.dtype, model(ROWS).dtype) == dtypes
    initialize(nn.Linear(1, 1), enabled=False)


@pytest.mark.usefixtures("in_bfloat16")
def test_fp16_optimizer_trains_masters_of_bfloat16() -> None:
    model = network_to_half(nn.Linear(3, 2))
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    before = optimizer.fp32_from_fp16_groups[0][0].clone()
    optimizer.backward(model(ROWS).float().sum())
    optimizer.step()
    assert {param.dtype for param in model.parameters()} == {BF16}
    assert not torch.equal(before, optimizer.fp32_from_fp16_groups[0][0])
