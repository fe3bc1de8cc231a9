"""min_scale, max_scale and hysteresis of GradScaler: the rule of DynamicLossScale."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from grad_scaler_cases import OF_TORCH, OURS, new_scaler
from torch.nn import Parameter

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
