"""A loss scale that the step itself updates, on the device of the parameters."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from fp16_cases import F32, INF, parameter
from scaled_steps import take_step

from apex_mp import _C
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedAdam
from apex_mp.scale import device_scale
from apex_mp.scale.device_scale import DeviceScale

RULE = DynamicLossScale(
    256.0, growth_interval=3, min_scale=16.0, max_scale=1024.0, hysteresis=2, growth_factor=3.0
)


@pytest.mark.parametrize("wait", [True, False], ids=["waited", "unwaited"])
def test_a_step_updates_it_by_the_rule_of_the_host(wait: bool, device: torch.device) -> None:
    rule, scale = RULE, DeviceScale(RULE, device)
    weight = parameter([1.0, 2.0], F32, device)
    optimizer = FusedAdam([weight])
    for overflow in random.Random(3).choices([True, False], [1, 2], k=40):
        weight.grad = torch.full_like(weight, INF if overflow else 256.0)
        divisor = scale.scale.clone()
        outcome = take_step(
            optimizer, check=True, wait=wait, loss_scale=scale, scale=divisor
        ).outcome
        rule = rule.update(overflow)
        assert scale.read() == rule
        if wait or device.type not in device_scale.DEVICE_TYPES:
            assert outcome.is_known
            assert outcome.found_inf == overflow


def test_gradients_are_divided_by_the_scale_before_its_update(device: torch.device) -> None:
    scale = DeviceScale(dataclasses.replace(RULE, growth_interval=1), device)
    weight = parameter([1.0], F32, device)
    optimizer = FusedAdam([weight], betas=(0.0, 0.999))
    weight.grad = torch.full_like(weight, 512.0)
    take_step(optimizer, check=True, loss_scale=scale, scale=scale.scale)
    assert optimizer.state[weight]["exp_avg"] == 2.0
    assert scale.scale == 768.0


FAULTS = {
    "state is of dtype Double; it must be Float": {"state": torch.zeros(3, dtype=torch.float64)},
    "state has 2 elements; it must have 3": {"state": torch.zeros(2)},
    "state is a tensor whose numbers do not lie": {"state": torch.zeros(3, device="meta")},
    "hysteresis is 0; it must be at least 1": {"rule": RULE.rule._replace(hysteresis=0)},
}


@pytest.mark.cpu_only
@pytest.mark.parametrize(("message", "wrong"), FAULTS.items(), ids=FAULTS)
def test_what_is_no_loss_scale_is_refused(message: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"DeviceLossScale: {message}"):
        _C.DeviceLossScale(**{"state": torch.zeros(3), "rule": RULE.rule, **wrong})
