"""GradScaler and max_grad_norm: a fused step clips by what was measured already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp16_cases import passes_over
from fused_adam_cases import F32, make_params
from grad_scaler_cases import OURS, give_scaled, new_scaler
from torch.nn import Parameter

from apex_mp.amp import GradScaler

MAX_NORM = 0.3
SHAPES = ((40, 30), (1100,), (0, 3), (7,))


def two_groups(
    make: Any, device: torch.device, dtype: torch.dtype = F32
) -> tuple[list[Parameter], Any]:
    params = make_params(device, dtype, SHAPES)
    groups = [{"params": params[:1]}, {"params": params[1:], "max_grad_norm": 2 * MAX_NORM}]
    return params, make(groups, max_grad_norm=MAX_NORM)


def prepare(way: str, scaler: GradScaler, optimizer: Any) -> None:
    if way == "unscale_":
        scaler.unscale_(optimizer)
    elif way == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 1.0)


CLIPPED = {name: OURS[name] for name in ("FusedAdam", "FusedSGD", "FusedLAMB")}
each_optimizer = pytest.mark.parametrize("make", CLIPPED.values(), ids=[*CLIPPED])


@pytest.mark.cpu_only  # the names of passes
@pytest.mark.parametrize(
    ("way", "before", "in_step"),
    [
        ("step alone", [], ["apex_mp::check_pass"]),
        # The user may have edited them since.
        ("unscale_", ["apex_mp::unscale_"], ["apex_mp::check_pass"]),
        ("clip_grad_norm_", ["apex_mp::check_pass"], []),
    ],
)
@each_optimizer
def test_a_step_measures_what_no_pass_before_it_has_measured(
    make: Any, way: str, before: list[str], in_step: list[str], device: torch.device
) -> None:
    params, optimizer = two_groups(make, device)
    scaler = new_scaler(device)
    for _ in range(2):  # The first step makes state.
        give_scaled(scaler, params, 0)
        with passes_over(1000) as first:
            prepare(way, scaler, optimizer)
        with passes_over(1000) as names:
            scaler.step(optimizer)
        scaler.update()
    rule = type(optimizer).__name__.removeprefix("Fused").lower()
    assert first == before
    assert [name for name in names if name.startswith("apex_mp")] == [
        *in_step,
        *(["apex_mp::measure_pass"] if rule == "lamb" else []),
        f"apex_mp::{rule}_pass",
    ]
