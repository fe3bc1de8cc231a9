"""FP16_Optimizer around a FusedAdam on several devices: scales, masters, clipping, overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fp16_cases import INF, assert_same
from plan_cases import parameter
from several_devices_cases import count_of_plans, side_of, spread
from test_step_plan_fp16 import CHANGES, DTYPES, SHAPES, Fp16Run

from apex_mp.core import readback
from apex_mp.engine import devices as engine_devices
from apex_mp.fp16_utils import _stepping
from apex_mp.scale import device_scale


@pytest.fixture(autouse=True, params=[True, False], ids=["waited", "unwaited"])
def two_sides(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(engine_devices, "device_of", side_of)
    waited = request.param
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", set() if waited else {device.type})
    monkeypatch.setattr(readback.Readback, "has_arrived", lambda self: False)
    yield
    readback._pending.clear()


@pytest.fixture
def fused_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step go by the legacy call."""
    monkeypatch.setattr(_stepping, "_step_legacy", None)


def make_run(**options: Any) -> Fp16Run:
    torch.manual_seed(0)
    model = [
        [parameter(*shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
        for _ in range(2)
    ]
    return Fp16Run(model, **options)


def make_spread_run(**options: Any) -> Fp16Run:
    run = make_run(**options)
    spread(run.inner)
    return run


each_limit = pytest.mark.parametrize("limit", [0.0, 0.3])
each_clip = pytest.mark.parametrize("clip", ["group", "global"])


@pytest.mark.usefixtures("fused_only")
@each_limit
@each_clip
def test_mixed_groups_are_stepped_and_clipped_as_in_float64(clip: str, limit: float) -> None:
    run = make_spread_run(clip=clip, limit=limit)
    run.train(3)
    run.missing = lambda step, index: (step + index) % 3 == 0
    run.train(4)
    assert count_of_plans(run.inner) == 2


@pytest.mark.usefixtures("fused_only")
@each_clip
@pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "warm"])
@pytest.mark.parametrize("index", [0, 1, 9, 10], ids=["fp16", "fp32", "other group", "other fp32"])
def test_an_overflow_on_one_device_changes_nothing(
    index: int, steps_before: int, clip: str
) -> None:
    run = make_spread_run(limit=0.3, clip=clip)
    run.train(steps_before)
    run.give()
    run.params[index].grad.view(-1)[-1] = INF  # type: ignore[union-attr]
    before = run.everything()
    run.optimizer.step()
    assert run.optimizer.overflow
    assert_same(run.everything(), before)
    run.train(2)


@each_limit
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_steps_after_a_change_are_those_of_masters_in_float64(
    change: Callable[[Fp16Run], None], limit: float
) -> None:
    run = make_spread_run(limit=limit)
    run.train(2)
    change(run)
    run.train(3)
    assert count_of_plans(run.inner) == 2
