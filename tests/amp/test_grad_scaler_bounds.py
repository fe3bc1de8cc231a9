"""min_scale, max_scale and hysteresis of GradScaler: the rule of DynamicLossScale."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from fused_adam_cases import make_params
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from torch.nn import Parameter
from waits import Waits

from apex_mp.amp import GradScaler
from apex_mp.loss_scale import DynamicLossScale

BOUNDS: dict[str, dict[str, Any]] = {
    "min_scale": {"min_scale": 4.0},
    "max_scale": {"max_scale": 100.0},
    "hysteresis": {"hysteresis": 3},
    "all": {"min_scale": 3, "max_scale": 50.0, "hysteresis": 2},
}
each_bound = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=[*BOUNDS])
MAKES = {"FusedAdam": OURS["FusedAdam"], "SGD": OF_TORCH["SGD"]}


def skip_or_step(scaler: Any, optimizer: Any, weight: Parameter, found_inf: bool) -> None:
    scaler.scale(torch.zeros((), device=weight.device))
    weight.grad = torch.full_like(weight, math.inf if found_inf else 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("make", MAKES.values(), ids=[*MAKES])
@pytest.mark.parametrize("seed", range(4))
@each_bound
def test_the_scale_follows_the_rule_through_checkpoints(
    bounds: dict[str, Any], seed: int, make: Any, device: torch.device
) -> None:
    rng = random.Random(seed)
    factors = {
        "growth_factor": rng.choice([2.0, 1.7]),
        "backoff_factor": rng.choice([0.5, 0.3]),
        "growth_interval": rng.choice([1, 3]),
    }
    weight = Parameter(torch.ones(3, device=device))
    optimizer = make([weight])
    scaler = new_scaler(device, init_scale=16.0, **factors, **bounds)
    expected = DynamicLossScale(16.0, **factors, **bounds)
    scales = set()
    for _ in range(60):
        if rng.random() < 0.1:
            saved = scaler.state_dict()
            scaler = new_scaler(device)
            scaler.load_state_dict(saved)
            assert scaler.state_dict() == saved
        found_inf = rng.random() < 0.4
        skip_or_step(scaler, optimizer, weight, found_inf)
        expected = expected.update(found_inf)
        assert scaler.get_scale() == expected.scale
        assert scaler._get_growth_tracker() == expected.good_steps
        assert scaler.state_dict()["overflows"] == expected.overflows
        scales.add(expected.scale)
    assert len(scales) >= 3


def test_one_overflow_of_several_optimizers_counts_once(device: torch.device) -> None:
    weights = [Parameter(torch.ones(3, device=device)) for _ in range(3)]
    optimizers = [
        make([weight]) for make, weight in zip([*MAKES.values()] * 2, weights, strict=False)
    ]
    scaler = new_scaler(device, init_scale=64.0, hysteresis=2)
    for _ in range(2):
        scaler.scale(torch.zeros((), device=device))
        for optimizer, weight in zip(optimizers, weights, strict=True):
            weight.grad = torch.full_like(weight, math.inf)
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0


def test_a_scale_that_is_set_is_the_users(device: torch.device) -> None:
    weight = Parameter(torch.ones(3, device=device))
    optimizer = OURS["FusedAdam"]([weight])
    scaler = new_scaler(device, min_scale=4.0)
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0
    skip_or_step(scaler, optimizer, weight, True)
    assert scaler.get_scale() == 2.0  # A bound never pushes.


def test_without_bounds_a_checkpoint_has_the_keys_of_torch(device: torch.device) -> None:
    theirs = torch.amp.GradScaler(device.type).state_dict()
    assert GradScaler(device.type).state_dict() == theirs
    bounded = GradScaler(device.type, min_scale=1.0)
    assert bounded.state_dict() == {
        **theirs,
        "min_scale": 1.0,
        "max_scale": None,
        "hysteresis": 1,
        "overflows": 0,
    }
    # Torch's reads it; torch's own leaves the bounds as they are.
    torch.amp.GradScaler(device.type).load_state_dict(bounded.state_dict())
    bounded.load_state_dict(theirs)
    assert bounded.state_dict()["min_scale"] == 1.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_scale": 0.0}, ValueError, r"min_scale is 0\.0; it must lie in"),
        ({"min_scale": "1"}, TypeError, r"min_scale is '1'; it must be a number"),
        ({"min_scale": 8.0, "max_scale": 4.0}, ValueError, r"max_scale is 4\.0; it must lie in"),
        ({"hysteresis": 0}, ValueError, r"hysteresis is 0; it must lie in"),
        ({"hysteresis": 1.5}, TypeError, r"hysteresis is 1\.5; it must be an int"),
        ({"init_scale": 0.0}, ValueError, r"GradScaler: init_scale is 0\.0; it must lie in \["),
        ({"init_scale": math.nan}, ValueError, r"GradScaler: init_scale is nan; it must lie in"),
        ({"init_scale": 2.0**128}, ValueError, r"init_scale is 3\.4\d+e\+38; it must lie in"),
        ({"growth_factor": 1.0}, AssertionError, r"The growth factor must be > 1\.0"),
    ],
)
def test_a_bound_out_of_range_is_a_sentence(
    options: dict[str, Any], error: type[Exception], message: str, device: torch.device
) -> None:
    with pytest.raises(error, match=message):
        GradScaler(device.type, **options)


def test_bounds_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        GradScaler("cpu", 2.0, 2.0, 0.5, 2000, True, 1.0)  # type: ignore[misc]


def test_an_update_without_steps_is_the_same_sentence_with_bounds(device: torch.device) -> None:
    messages = []
    for bounds in ({}, {"min_scale": 1.0}):
        scaler = new_scaler(device, **bounds)
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to") as caught:
            scaler.update()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "scaler.step(optimizer)" in messages[0]


def test_the_host_never_waits_for_a_bounded_scale(device: torch.device) -> None:
    params = make_params(device)
    optimizer = OURS["FusedAdam"](params)
    scaler = new_scaler(device, min_scale=1.0, max_scale=2.0**20, hysteresis=2)
    give_scaled(scaler, params, 0)
    scaler.step(optimizer)
    with Waits() as waits:
        scaler.update()
    assert waits.count == 0


def test_overflows_are_counted_anew_when_the_scale_is_set(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler(device.type, init_scale=8.0, hysteresis=2)

    def overflow() -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()

    overflow()
    assert scaler.state_dict()["overflows"] == 1
    scaler.update(64.0)
    assert scaler.state_dict()["overflows"] == 0
    overflow()
    assert scaler.get_scale() == 64.0
