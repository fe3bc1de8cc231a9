"""Each way skips a step whose gradients hold inf or NaN, and says so: see ways.py."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import INF, NAN, assert_same, differ, pull
from way_runs import RULE, Run
from ways import Twin, Way, give, grads_of, spoiled, train, ways_with

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from apex_mp.scale.amp_scaler import LossScaler as AmpLossScaler

pytestmark = [
    pytest.mark.usefixtures("amp_off", "other_device", "host"),
    pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf"),
]


def iterate(run: Run, grads: list[Any]) -> Any:
    run.zero_grad()
    give(run, grads)
    return run.step()


@ways_with()
def test_training_is_that_of_float32_without_the_skipped_steps(
    sides: int, way: Way, device: torch.device
) -> None:
    run = way.start(device, sides=sides)
    twin = Twin(run)
    train(run, twin, [INF, NAN, None, None, NAN, None, None, None, -INF, None])
    twin.assert_is(run, is_near=sides == 2 and "clipped" in way.inner)


@ways_with()
@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e36])  # The last is finite until it is scaled.
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
def test_an_overflow_changes_nothing_but_the_scale(
    sides: int, steps: int, where: int, value: float, way: Way, device: torch.device
) -> None:
    run = way.start(device, sides=sides)
    train(run, None, [None] * steps)
    before = run.numbers()
    assert iterate(run, spoiled(grads_of(run, 5), value, where)) is None
    assert run.skipped is True
    assert run.scale == RULE.scale / 2
    assert_same(run.numbers(), before)
    iterate(run, grads_of(run, 6))
    assert run.skipped is False
    assert run.scale == RULE.scale / 2
    assert differ(run.numbers(), before)


@ways_with("static scale")
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("rule", [StaticLossScale(128.0), NoOpLossScale()])
def test_a_static_scale_stays_where_it_is_and_skips(
    rule: LossScale, value: float, way: Way, device: torch.device
) -> None:
    run = way.start(device, rule)
    twin = Twin(run)
    train(run, twin, [None, value, None])
    twin.assert_is(run)
    assert run.scale == rule.scale


# Each bound, the interval and the hysteresis are met on the way.
BOUNDED = DynamicLossScale(
    2.0**10,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_interval=2,
    min_scale=2.0**7,
    max_scale=2.0**13,
    hysteresis=2,
)
WALK = "...x......xxxxx.xx..x....x...."


GIVEN: dict[str, Callable[[DynamicLossScale], Any]] = {
    "value": lambda rule: rule,
    "scaler of amp": AmpLossScaler,
    "scaler of fp16_utils": lambda rule: (
        FP16_Optimizer(torch.optim.SGD([torch.zeros(1)]), rule, verbose=False).loss_scaler
    ),
}


@ways_with("bounds and hysteresis")
@pytest.mark.parametrize("given", GIVEN)
def test_the_scale_follows_the_rule_to_its_bounds(
    given: str, way: Way, device: torch.device
) -> None:
    run = way.start(device, GIVEN[given if way.has("static scale") else "value"](BOUNDED))
    expected, scales = BOUNDED, []
    for letter in WALK:
        iterate(run, [0.25, 0.25, INF if letter == "x" else 0.25])
        assert run.skipped == (letter == "x")
        expected = expected.update(letter == "x")
        scales.append(run.scale)
        assert run.scale == expected.scale
    assert {2.0**7, 2.0**13} <= {*scales}


@ways_with()
def test_the_scale_backs_off_and_grows_after_good_steps(way: Way, device: torch.device) -> None:
    run = way.start(device)
    scales = []
    for letter in "x...x....xx....":
        iterate(run, [0.25, INF if letter == "x" else 0.25, 0.25])
        scales.append(int(run.scale))
    assert scales == [512] * 4 + [256] * 4 + [512, 256, 128, 128, 128, 128, 256]


def said(caught: list[Any]) -> list[Any]:
    """Return the warnings of skips; the lowest scale, and gradients of 0, have others."""
    return [one for one in caught if "skipped 50 steps" in str(one.message)]


@ways_with("warning of skips", one_of_each_api=True)
def test_fifty_skips_in_a_row_warn_once(way: Way, device: torch.device) -> None:
    run = way.start(device, dataclasses.replace(RULE, scale=2.0**60))

    def steps(count: int, value: float) -> None:
        for _ in range(count):
            iterate(run, [2.0**-60, value, 2.0**-60])
            assert run.skipped == (value == INF)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(49, INF)
        steps(1, 2.0**-60)
        steps(49, INF)
        assert said(caught) == []
        steps(61, INF)
        assert len(said(caught)) == 1
        steps(1, 2.0**-60)
        steps(50, INF)
    first, _ = said(caught)
    assert first.category is RuntimeWarning
    assert "has skipped 50 steps in a row" in str(first.message)
    assert f"{run.names()[1]} [5]: 5 inf, 0 NaN" in str(first.message)
    assert first.filename.endswith("way_runs.py")  # the line that called step()


@ways_with("report")
@pytest.mark.parametrize("cleared", [False, True], ids=["", "cleared"])
@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
def test_the_report_names_parameters_and_counts(
    clipped: bool, cleared: bool, way: Way, device: torch.device, host: str
) -> None:
    run = way.start(device)
    grads = grads_of(run, 0)
    grads[0][0, 0] = NAN
    grads[2][0] = torch.tensor([[INF, -INF, 1.0], [INF, NAN, 1.0]])
    give(run, grads)
    if clipped:
        run.clip(1.0)
    run.step()
    if cleared:
        run.zero_grad()
    counts = ["3 inf, 1 NaN", "0 inf, 1 NaN"]
    expected = [f"c [2, 2, 3]: {counts[0]}", f"a [3, 3]: {counts[1]}"]
    said = [str(one) for one in run.report()]
    if said != expected:  # A host that has not waited has no counts of what is gone.
        assert (cleared, host) == (True, "does not wait")
        assert said == ["a [3, 3]: inf or NaN", "c [2, 2, 3]: inf or NaN"]
    iterate(run, grads_of(run, 1))
    assert not run.skipped
    assert len(run.report()) == 2  # of the last skipped step


@ways_with()
def test_finite_gradients_whose_sum_is_infinite_are_no_overflow(
    way: Way, device: torch.device
) -> None:
    run = way.start(device)
    give(run, [torch.finfo(param.dtype).max / RULE.scale for param in run.params])
    run.step()
    assert not run.skipped
    assert run.scale == RULE.scale


@ways_with()
@pytest.mark.parametrize("constant", [NAN, INF])
def test_a_loss_that_is_not_finite_is_no_overflow_if_gradients_are(
    constant: float, way: Way, device: torch.device
) -> None:
    run = way.start(device)
    twin = Twin(run)
    grads = grads_of(run, 0)
    run.backward(pull(*zip(run.params, grads, strict=True)) + constant)
    run.step()
    assert not run.skipped
    twin.step(*grads)
    twin.assert_is(run)


@ways_with()
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_one_step_is_skipped_however_many_of_its_losses_overflow(
    bad: tuple[int, ...], way: Way, device: torch.device
) -> None:
    run = way.start(device)
    twin = Twin(run)
    for index in range(3):
        grads = grads_of(run, index)
        give(run, spoiled(grads, INF) if index in bad else grads)
    run.step()
    assert run.skipped
    if way.api == "OptimWrapper":  # It has a scale for each loss.
        scales = [RULE.scale / (2 if index in bad else 1) for index in range(3)]
        assert [scaler.loss_scale() for scaler in run.optimizer._loss_scaler] == scales
    else:  # amp updates the scale after each block.
        updates = len(bad) if way.api in ("amp.init", "O1", "O2") else 1
        assert run.scale == RULE.scale / 2**updates
    twin.assert_is(run)
    train(run, twin, [None])
    twin.assert_is(run)


@ways_with()
def test_nothing_keeps_what_was_dropped_alive(way: Way, device: torch.device) -> None:
    run = way.start(device)
    train(run, None, [INF, None])
    dead = weakref.ref(run.params[0]), weakref.ref(run.optimizer)
    run.model = run.params = run.optimizer = None
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
