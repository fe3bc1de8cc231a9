"""What the fused step decides between its passes: skip, clip, next loss scale."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from exact_lists import CPU
from op_cases import CHUNK, F16, F32, F64, number
from step_cases import (
    assert_decided_rightly,
    assert_same_rows,
    assert_steps_exactly,
    copy_of,
    each_rule,
    sample,
)
from step_driver import Adam, Group, Sgd, Step

from apex_mp.loss_scale import AMP_PRESET, DynamicLossScale
from apex_mp.scale.device_scale import DeviceScale

SIZES = [5, 600, 1, CHUNK + 5, 0, 40, 2 * CHUNK]
PLACES = [(0, 0), (1, 599), (3, 0), (3, CHUNK), (6, CHUNK - 1), (6, 2 * CHUNK - 1)]
RULE = DynamicLossScale(
    2.0**10, growth_interval=3, min_scale=2.0**6, max_scale=2.0**12, hysteresis=2
)


@each_rule
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_inf_and_nan_change_nothing_but_the_loss_scale(
    place: tuple[int, int], bad: float, groups: list[Group]
) -> None:
    task = sample(SIZES, groups=groups, check=True)
    row, element = place
    task.rows[row].grad[element] = bad
    before = copy_of(task)
    step = Step(task)
    state = DeviceScale(dataclasses.replace(AMP_PRESET, good_steps=7), CPU)
    task.scale = state.scale
    outcome = step.run(task, loss_scale=state)
    assert outcome.found_inf == 1
    assert_same_rows(task, before)
    assert outcome.loss_scale == (2.0**15, 0, 0)
    assert state.read() == dataclasses.replace(AMP_PRESET, scale=2.0**15)
    # The next step knows nothing of it.
    task.rows[row].grad[element] = 1.0
    assert_steps_exactly(step, task)


@each_rule
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inf_and_nan_are_stepped_with_if_nobody_checks(bad: float, groups: list[Group]) -> None:
    task = sample(SIZES, groups=groups)
    task.rows[3].grad[7] = bad
    assert_steps_exactly(Step(task), task)
    assert not task.rows[3].param[7].isfinite()


@each_rule
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("known", [1.0, 2.0, -1.0])
def test_an_overflow_that_is_known_skips_the_step(
    known: float, check: bool, groups: list[Group]
) -> None:
    task = sample(SIZES, groups=groups, check=check)
    task.found_inf = torch.tensor([known])
    before = copy_of(task)
    step = Step(task)
    assert step.run(task).found_inf == 1
    assert_same_rows(task, before)
    task.found_inf.zero_()
    assert_steps_exactly(step, task)


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_the_first_rows_with_inf_or_nan_are_named(count: int) -> None:
    task = sample([3] * 7 + SIZES, check=True)
    rows = [i for i, row in enumerate(task.rows) if row.grad.numel()]
    bad = sorted(random.Random(count).sample(rows, count))
    for i, row in enumerate(bad):
        task.rows[row].grad[-1] = math.nan if i % 2 else math.inf
    outcome = Step(task).run(task, norms=True)
    assert outcome.nonfinite_rows == bad[:8]


def test_rows_with_inf_or_nan_are_numbered_among_those_with_a_gradient() -> None:
    task = sample([3] * 7 + SIZES, check=True)
    task.rows[1].grad = task.rows[4].grad = task.rows[6].grad = None
    task.rows[0].grad[0] = task.rows[5].grad[0] = math.inf
    outcome = Step(task).run(task, norms=True)
    assert outcome.nonfinite_rows == [0, 3]


CLIPPING = {
    "nobody": ([0.0, 0.0, 0.0], [None] * 3),
    "each group": ([0.5, 1e6, 2.0], [None] * 3),
    "one group": ([0.0, 0.5, 0.0], [None] * 3),
    "given norms": ([0.5, 1e6, 0.0], [30.0, 40.0, 50.0]),
    "a given norm among others": ([0.5, 0.25, 2.0], [None, number(70.0, CPU, F64), None]),
    "norms on the device": ([0.5, 0.5, 0.5], [number(90.0, CPU), number(7.0, CPU, F64), 80.0]),
}


@pytest.mark.parametrize("rule", [Adam, Sgd], ids=["adam", "sgd"])
@pytest.mark.parametrize("by_global_norm", [False, True], ids=["each", "global"])
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", CLIPPING)
def test_gradients_are_clipped(
    name: str, check: bool, by_global_norm: bool, rule: type[Group]
) -> None:
    max_norms, norms = CLIPPING[name]
    groups = [
        rule(max_norm=max_norm, norm=norm, maximize=i == 1)
        for i, (max_norm, norm) in enumerate(zip(max_norms, norms, strict=True))
    ]
    task = sample(SIZES, groups=groups, scale=number(24.0, CPU), check=check)
    task.clip_by_global_norm = by_global_norm
    outcome = assert_steps_exactly(Step(task), task)
    wanted = any(m and norm is None for m, norm in zip(max_norms, norms, strict=True))
    assert_decided_rightly(task, outcome, measured=wanted)
    asked = Step(task).run(task, norms=True)
    assert_decided_rightly(task, asked, measured=True)


@pytest.mark.parametrize("rule", [RULE, dataclasses.replace(RULE, growth_factor=1.7)], ids=str)
def test_the_loss_scale_is_that_of_the_host_to_the_bit(rule: DynamicLossScale) -> None:
    task = sample([40, 3], [(F32,), (F32,), (None,)], check=True)
    step = Step(task)
    state = DeviceScale(rule, CPU)
    task.scale = state.scale
    overflows = random.Random(5).choices([True, False], [1, 2], k=60)
    for overflow in overflows:
        task.rows[0].grad[39] = math.inf if overflow else 0.5
        scale = state.scale.item()
        outcome = step.run(task, loss_scale=state)
        rule = rule.update(overflow)
        assert outcome.loss_scale == (rule.scale, rule.good_steps, rule.overflows)
        assert state.read() == rule
        assert outcome.found_inf == overflow
        assert outcome.scale == scale  # That of before the update has scaled the gradients.
        factors = [abs(group.scaled_factor) for group in outcome.groups]
        assert factors == [1 / scale] * len(factors), f"{factors} for {scale}"


@pytest.mark.parametrize("dtype", [F16, F32, F64])
def test_a_plain_step_reads_no_gradient_in_pass_1(dtype: torch.dtype) -> None:
    task = sample(SIZES, [(dtype,), (dtype,), (None,)])
    outcome = assert_steps_exactly(Step(task), task)
    assert math.isnan(outcome.norm)
