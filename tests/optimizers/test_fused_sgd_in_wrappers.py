"""FusedSGD in GradScaler, FP16_Optimizer and amp: overflows, clipping, what nobody waits for."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    INF,
    NAN,
    STEPS_TO_COUNT_PASSES,
    parameter,
    passes_over,
    pull,
)
from fused_adam_cases import assert_same_state, copies_of, give_grads, make_params
from scaled_steps import take_step
from tolerances import assert_same_bits
from torch.nn import Parameter
from waits import Waits

from apex_mp import _C, fp16_utils
from apex_mp.core import readback
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedSGD
from apex_mp.scale import device_scale

OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
DAMPENED = OPTIONS | {"dampening": 0.5}
each_options = pytest.mark.parametrize("options", [OPTIONS, DAMPENED], ids=["plain", "dampened"])


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The device is one that the host does not wait for, and from which nothing arrives soon."""
    if _C.cpu_level() != "cuda on cpu" and device.type == "cpu":
        pytest.skip("of a step on the CPU the host knows the outcome; make cuda-on-cpu runs this")
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(readback.Readback, "has_arrived", lambda self: False)


# --- torch.amp.GradScaler


@each_options
def test_nobody_waits_in_grad_scaler_and_the_first_step_that_is_taken_is_the_first(
    options: dict[str, Any], device: torch.device, left_alone: None
) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    optimizer, expected = FusedSGD(params, **options), FusedSGD(theirs, **options)
    for step, found in enumerate([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]):
        give_grads(params, step, factor=1.0 if not found else math.inf)
        optimizer.found_inf = torch.tensor(found, device=device)
        optimizer.grad_scale = torch.tensor(1.0, device=device)
        with Waits() as waits:
            optimizer.step()
        assert waits.count == 0
        del optimizer.found_inf, optimizer.grad_scale
        if not found:
            give_grads(theirs, step)
            expected.step()
    assert_same_state(optimizer, expected)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_step_without_momentum_leaves_a_buffer_fresh(
    known: bool, device: torch.device, left_alone: None
) -> None:
    weight = Parameter(torch.ones(3, device=device))
    optimizer = FusedSGD([weight], 0.01, momentum=0.5, dampening=0.5)
    (group,) = optimizer.param_groups
    for found, momentum in ((1.0, 0.5), (0.0, 0.0), (0.0, 0.5)):
        group["momentum"] = momentum
        weight.grad = torch.full((3,), 4.0, device=device)
        optimizer.found_inf = torch.tensor(found, device=device)
        if known and not found:
            del optimizer.found_inf
        optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [4.0] * 3  # Not dampened.


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_buffers_that_hold_nothing_yet_are_not_saved(
    how: str, device: torch.device, left_alone: None
) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, **DAMPENED)
    give_grads(params, 0, missing=lambda step, index: index > 2)
    optimizer.found_inf = torch.tensor(0.0, device=device)
    optimizer.step()
    give_grads(params, 1, missing=lambda step, index: index <= 2)
    optimizer.found_inf = torch.tensor(1.0, device=device)
    optimizer.step()
    del optimizer.found_inf
    saved = (optimizer if how == "state_dict" else copy.deepcopy(optimizer)).state_dict()
    assert sorted(saved["state"]) == [0, 1, 2]
    others = copies_of(params)
    other = FusedSGD(others, **DAMPENED)
    other.load_state_dict(saved)
    for each, its in ((optimizer, params), (other, others)):
        give_grads(its, 2)
        each.step()
    assert_same_state(optimizer, other)
    assert_same_bits(optimizer.state[params[5]]["momentum_buffer"] != 0, params[5].grad != 0)


# --- FP16_Optimizer


def make_fp16(params: Any, face: Any = fp16_utils.FP16_Optimizer, **options: Any) -> Any:
    inner = FusedSGD(params, **(OPTIONS | options))
    args = {"init_scale": 1024.0, "scale_window": 3}
    return face(inner, dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False)


@pytest.mark.cpu_only  # test_cuda_steps.py counts launches.
def test_the_step_unscales_clips_and_copies_in_two_passes(device: torch.device) -> None:
    elements = 4099
    params = [Parameter(torch.ones(elements, dtype=F16, device=device))]
    optimizer = make_fp16(params, max_grad_norm=1.0)
    for _ in range(STEPS_TO_COUNT_PASSES):
        optimizer.zero_grad()
        optimizer.backward(pull((params[0], 1.0)))
        with passes_over(elements) as names:
            optimizer.step()
    assert names == ["apex_mp::check_pass", "apex_mp::sgd_pass"]
    master = optimizer.param_groups[0]["params"][0]
    assert_same_bits(params[0].detach(), master.detach().half())


# The same numbers whether the host waits or not.


def test_the_host_waits_for_nothing_and_hears_of_skips_later(
    device: torch.device, left_alone: None
) -> None:
    params = [parameter([1.0, 2.0], F16, device), parameter([[3.0]], F16, device)]
    optimizer = make_fp16(params, max_grad_norm=1.0)
    with Waits() as waits:
        for value in (1.0, INF, 2.0, NAN):
            optimizer.zero_grad()
            pair = (params[1], value) if value == INF else (params[0], value)
            optimizer.backward(pull((params[0], 1.0), pair))
            optimizer.step()
    assert waits.count == 0
    assert len(readback._pending) == 4
    assert optimizer.overflow is True
    assert optimizer.loss_scale == 256.0


# --- Several devices


@pytest.mark.parametrize("value", [1.0, INF])
def test_a_loss_scale_on_the_device_is_updated_where_the_host_waits_too(
    value: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", set())
    scale = device_scale.DeviceScale(DynamicLossScale(scale=8.0, growth_interval=1), device)
    weight = Parameter(torch.ones(3, device=device))
    weight.grad = torch.full((3,), value, device=device)
    optimizer = FusedSGD([weight], **DAMPENED)
    result = take_step(optimizer, check=True, loss_scale=scale)
    assert scale.scale.item() == (16.0 if value == 1.0 else 4.0)
    assert (result.outcome.found_inf, result.outcome.is_known) == (value == INF, True)
    state = optimizer.state[weight] if value == 1.0 else {}
    assert "is_fresh" not in state  # The host knows: nobody need ask the device again.
