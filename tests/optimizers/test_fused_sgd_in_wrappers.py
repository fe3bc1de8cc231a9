"""FusedSGD in GradScaler, FP16_Optimizer and amp: overflows, clipping, what nobody waits for."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    F32,
    INF,
    NAN,
    STEPS_TO_COUNT_PASSES,
    everything,
    parameter,
    passes_over,
    pull,
)
from fused_adam_cases import assert_same_state, copies_of, give_grads, make_params
from scaled_steps import take_step
from several_devices_cases import side_of, spread
from tolerances import assert_same_bits
from torch.nn import Parameter
from waits import Waits

from apex_mp import _C, fp16_utils
from apex_mp.core import readback
from apex_mp.engine import devices as engine_devices
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

Program = tuple[list[torch.Tensor], list[Any]]


def program(seed: int, device: torch.device) -> Program:
    """A random training run with looks at everything; what it ends with."""
    rng = random.Random(seed)
    kinds = [F16, rng.choice([F32, F16])]
    params = [parameter([1.0, 2.0], kinds[0], device), parameter([[3.0]], kinds[1], device)]
    options = rng.choice([OPTIONS, DAMPENED, {"lr": 0.1}])
    optimizer = make_fp16(params, **options, max_grad_norm=rng.choice([0.0, 1.0]))
    seen: list[Any] = []
    for _ in range(15):
        if rng.random() < 0.8:
            optimizer.zero_grad(set_to_none=rng.random() < 0.5)
        for _ in range(rng.choice([1, 1, 2])):
            some = rng.sample(params, rng.choice([1, 2, 2]))
            value = rng.choice([1.0, -0.5, 3e3, INF, NAN] + [0.25] * 8)
            later = rng.random() < 0.3
            loss = pull(*((param, value) for param in some))
            optimizer.backward(loss, update_master_grads=not later)
        if rng.random() < 0.1:
            optimizer.loss_scale = rng.choice([32.0, 256.0])
        if rng.random() < 0.1:
            seen.append(optimizer.clip_master_grads(0.5))
        optimizer.step()
        if rng.random() < 0.2:
            seen.append((optimizer.overflow, optimizer.loss_scale, optimizer.cur_iter))
        if rng.random() < 0.1:
            optimizer.load_state_dict(optimizer.state_dict())
    report = sorted((one.name, one.shape) for one in optimizer.overflow_report)
    seen += [optimizer.loss_scaler.state_dict(), report]
    optimizer.state_dict()  # Buffers that hold nothing yet go.
    return everything(optimizer, *params), seen


@pytest.fixture
def each_way(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[str]:
    def ways() -> Iterator[str]:
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
        monkeypatch.setattr(readback.Readback, "has_arrived", lambda self: False)
        yield "unwaited"
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", set())
        yield "waited"

    return ways()


@pytest.mark.parametrize("seed", range(16))
def test_random_programs_end_the_same_whether_the_host_waits_or_not(
    seed: int, each_way: Iterator[str], device: torch.device
) -> None:
    results = {way: program(seed, device) for way in each_way}
    unwaited, waited = results["unwaited"], results["waited"]
    assert str(unwaited[1]) == str(waited[1])
    for ours, theirs in zip(unwaited[0], waited[0], strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


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


def test_a_report_after_the_gradients_are_gone_names_who_overflowed(
    device: torch.device, left_alone: None
) -> None:
    params = [parameter([1.0, 2.0], F16, device), parameter([[3.0]], F32, device)]
    params += [parameter([1.0] * 3, F16, device)]
    optimizer = make_fp16(params)
    optimizer.backward(pull((params[0], 1.0), (params[2], INF)))  # The second has no gradient.
    optimizer.step()
    optimizer.zero_grad()
    assert [str(one) for one in optimizer.overflow_report] == [
        "group 0, parameter 2 [3]: inf or NaN"
    ]


# --- Several devices


@pytest.fixture
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parameters of odd and of even size lie on two devices."""
    monkeypatch.setattr(engine_devices, "device_of", side_of)


def train_on_sides(sides: int, max_grad_norm: float, clip: str) -> list[torch.Tensor]:
    params = [parameter([1.0] * size, kind) for size in (1, 2, 3, 4) for kind in (F16, F32)]
    groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:]}]
    inner = FusedSGD(groups, **DAMPENED, max_grad_norm=max_grad_norm)
    if sides == 2:
        spread(inner)
    args = {"init_scale": 1024.0}
    optimizer = fp16_utils.FP16_Optimizer(inner, 1.0, True, args, verbose=False, clip=clip)
    for step, value in enumerate((INF, 0.5, 1.5, NAN, 2.0)):
        optimizer.zero_grad()
        some = params if step != 2 else params[1:]
        optimizer.backward(pull(*((param, value) for param in some)))
        optimizer.step()
    assert optimizer.loss_scale == 256.0
    optimizer.state_dict()  # Flags of buffers that hold nothing yet go.
    return everything(optimizer, *params)


@pytest.mark.cpu_only
@pytest.mark.parametrize("waits", [True, False], ids=["waited", "unwaited"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("clip", ["group", "global"])
def test_parameters_on_several_devices_are_stepped_as_on_one(
    clip: str, max_grad_norm: float, waits: bool, two_sides: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", set() if waits else {"cpu"})
    two, one = (train_on_sides(sides, max_grad_norm, clip) for sides in (2, 1))
    for ours, theirs in zip(two, one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if max_grad_norm else 0.0, atol=0.0)


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
