"""FusedAdam on several devices takes the step of one plan, and its host waits for nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    F32,
    SHAPES,
    assert_same_state,
    copies_of,
    give_grads,
    make_params,
)
from plan_cases import KINDS, fresh_grad, make_run, parameter
from rule_cases import SUBJECTS, assert_same_as_torch
from scaled_steps import take_step
from several_devices_cases import count_of_plans, side_of, spread
from tolerances import TRAJECTORY_TOLERANCES, assert_near
from torch.nn import Parameter
from waits import Waits

from apex_mp.engine import devices as engine_devices
from apex_mp.engine.devices import DevicePlans
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedAdam
from apex_mp.scale.device_scale import DeviceScale
from apex_mp.step.scaled_step import StepResult

SCALES: dict[str, Callable[[], Any]] = {
    "1": lambda: 1.0,
    "a number": lambda: 128.0,
    "a tensor": lambda: torch.tensor([[128.0]]),
}


OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_devices, "device_of", side_of)


# --- What nobody clips is stepped to the bit as by one plan. A Run compares with a copy, which has
# --- one plan, and with float64.


@pytest.mark.parametrize("by_list", [False, True], ids=["grad", "list"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_that_of_one_plan(kind: str, by_list: bool) -> None:
    run = make_run(kind)
    run.by_list = by_list
    for group in run.optimizer.param_groups:
        group["max_grad_norm"] = 0.0
    spread(run.optimizer)
    run.train(3)
    run.make_grad = lambda p, step, i: None if (step + i) % 3 == 0 else fresh_grad(p, step, i)
    run.train(4)
    assert count_of_plans(run.optimizer) == 2


def one_side_each() -> list[list[Parameter]]:
    return [[parameter(4), parameter(2)], [parameter(3)], [parameter(6)]]


def both_sides() -> list[list[Parameter]]:
    return [[parameter(4), parameter(3)], [parameter(5), parameter(2)]]


def an_empty_group() -> list[list[Parameter]]:
    return [[parameter(4)], [], [parameter(5), parameter(2)]]


def one_side_only() -> list[list[Parameter]]:
    return [[parameter(4)], [parameter(2)]]


each_layout = pytest.mark.parametrize(
    "layout", [one_side_each, both_sides, an_empty_group, one_side_only], ids=lambda f: f.__name__
)


def make_optimizer(groups: list[list[Parameter]], **options: Any) -> FusedAdam:
    """An optimizer whose groups differ in their learning rate."""
    return FusedAdam(
        [{"params": one, "lr": 0.05 / (i + 1)} for i, one in enumerate(groups)],
        weight_decay=0.1,
        **options,
    )


# --- Clipping.


def all_of(groups: list[list[Parameter]]) -> list[Parameter]:
    return [param for one in groups for param in one]


def clipped_pair(
    groups: list[list[Parameter]], **options: Any
) -> tuple[FusedAdam, FusedAdam, list[Parameter], list[Parameter]]:
    """An optimizer on two devices and its like on one, with their parameters."""
    twins = [copies_of(one) for one in groups]
    optimizer = spread(make_optimizer(groups, max_grad_norm=0.3, eps=1e-3, **options))
    expected = make_optimizer(twins, max_grad_norm=0.3, eps=1e-3, **options)
    return optimizer, expected, all_of(groups), all_of(twins)


@each_layout
@pytest.mark.parametrize("limits", [(0.3, 0.3), (0.3, 0.0)], ids=["all clip", "one clips"])
def test_groups_are_clipped_by_their_norm_over_all_devices(
    limits: tuple[float, float], layout: Callable[[], list[list[Parameter]]]
) -> None:
    optimizer, expected, params, twins = clipped_pair(layout())
    for one in (optimizer, expected):
        for index, group in enumerate(one.param_groups):
            group["max_grad_norm"] = limits[index % 2]
    for step in range(5):
        give_grads(params, step)
        give_grads(twins, step)
        optimizer.step()
        expected.step()
        assert_same_as_torch(optimizer, SUBJECTS["Adam"], expected)
    if layout in (one_side_each, one_side_only):
        assert_same_state(optimizer, expected)


# --- Overflows.


def result_of(optimizer: FusedAdam, **options: Any) -> StepResult:
    return take_step(optimizer, check=True, **options)


@pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "warm"])
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_an_overflow_on_one_device_skips_all(
    index: int, steps_before: int, device: torch.device
) -> None:
    params = make_params(device)
    if not params[index].numel():
        index -= 1
    optimizer = spread(FusedAdam(params, master_weights=True, **OPTIONS))
    for step in range(steps_before):
        give_grads(params, step)
        optimizer.step()
    before = copy.deepcopy(optimizer)
    give_grads(params, 7)
    params[index].grad.view(-1)[-1] = float("inf")
    result = result_of(optimizer)
    assert result.outcome.found_inf is True
    assert_same_state(optimizer, before)
    give_grads(params, 8)
    result = result_of(optimizer)
    assert result.outcome.found_inf is False
    assert {float(state["step"]) for state in optimizer.state.values()} == {steps_before + 1.0}


# --- The host waits for nothing.


def plain_step(optimizer: FusedAdam, device: torch.device) -> None:
    optimizer.step()


def step_in_a_scaler(optimizer: FusedAdam, device: torch.device) -> None:
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.grad_scale = torch.full((), 8.0, device=device)
    optimizer.step()


def clip_by_the_norm_of_all(optimizer: FusedAdam, device: torch.device) -> None:
    scale = torch.full((1,), 8.0, device=device)
    take_step(optimizer, clip_by_global_norm=True, scale=scale)


def check_before(optimizer: FusedAdam, device: torch.device) -> None:
    scale = DeviceScale(DynamicLossScale(), device)
    result = result_of(optimizer, wait=False, loss_scale=scale, scale=scale.scale)
    assert not result.outcome.is_known


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize(
    "step",
    [plain_step, step_in_a_scaler, clip_by_the_norm_of_all, check_before],
    ids=lambda step: step.__name__,
)
def test_the_host_waits_for_nothing(
    step: Callable[[FusedAdam, torch.device], None],
    max_grad_norm: float,
    device: torch.device,
) -> None:
    params = make_params(device)
    optimizer = spread(make_optimizer([params[:3], params[3:]], max_grad_norm=max_grad_norm))
    for number in range(3):
        give_grads(params, number)
        with Waits() as waits:
            step(optimizer, device)
        assert waits.count == 0
    assert all(float(optimizer.state[param]["step"]) == 3.0 for param in params)


# --- Plans come and go.


def test_a_first_parameter_on_another_device_needs_several_plans() -> None:
    # One without a gradient may be where there are no kernels.
    elsewhere = Parameter(torch.ones(3, device="meta"), requires_grad=False)
    params = [parameter(4), parameter(3)]
    optimizer = FusedAdam([elsewhere, *params], **OPTIONS)
    elsewhere.requires_grad_()
    expected = FusedAdam(copies_of(params), **OPTIONS)
    for step in range(3):
        give_grads(params, step)
        give_grads(expected.param_groups[0]["params"], step)
        optimizer.step()
        expected.step()
    assert isinstance(optimizer._engine.plan, DevicePlans)
    del optimizer.param_groups[0]["params"][0]
    assert_same_state(optimizer, expected)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.cuda_only
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_cpu_and_gpu_step_together(max_grad_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # devices are what they are
    devices = [torch.device("cpu"), torch.device("cuda", 0)]
    train_on(devices, max_grad_norm)


@pytest.mark.cuda_only
@two_gpus
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_two_gpus_step_together_and_the_host_does_not_wait(
    max_grad_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    devices = [torch.device("cuda", 1), torch.device("cuda", 0)]
    optimizer = train_on(devices, max_grad_norm)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.found_inf = torch.zeros((), device=devices[0])
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_on(devices: list[torch.device], max_grad_norm: float) -> FusedAdam:
    """Train on several devices, and compare with one CPU."""
    twins = make_params(torch.device("cpu"))
    params = [
        Parameter(twin.detach().to(devices[index % len(devices)], copy=True))
        for index, twin in enumerate(twins)
    ]
    options = {**OPTIONS, "eps": 1e-3, "max_grad_norm": max_grad_norm}
    optimizer, expected = FusedAdam(params, **options), FusedAdam(twins, **options)
    for step in range(5):
        give_grads(params, step)
        give_grads(twins, step)
        optimizer.step()
        expected.step()
    for param, twin in zip(params, twins, strict=True):
        assert_near(param.detach().cpu(), twin.detach(), TRAJECTORY_TOLERANCES[F32])
    return optimizer


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("everywhere", [False, True], ids=["group", "global"])
def test_scaled_and_unscaled_gradients_are_measured_together(
    everywhere: bool, check: bool, scale: Callable[[], Any]
) -> None:
    optimizer, expected, params, twins = clipped_pair(both_sides())
    outcomes: list[Any] = []
    for one, own in ((optimizer, params), (expected, twins)):
        # Those of even size have their scaled gradient in another parameter, others in their own.
        models = [
            Parameter(param.detach().half()) if i % 3 else None for i, param in enumerate(own)
        ]
        for step in range(3):
            factor = float(scale())
            for index, (param, model) in enumerate(zip(own, models, strict=True)):
                grad = fresh_grad(param, step, index)
                if model is None:
                    param.grad = grad
                else:
                    model.grad = (grad * factor).half()
            rest = iter(models)
            lists: Any = [[next(rest) for _ in group["params"]] for group in one.param_groups]
            result = take_step(
                one,
                grads_of=lists,
                copies=lists,
                scale=scale(),
                check=check,
                clip_by_global_norm=everywhere,
            )
            outcomes.append(result.outcome)
    assert_same_as_torch(optimizer, SUBJECTS["Adam"], expected)
    for ours, theirs in zip(outcomes[:3], outcomes[3:], strict=True):
        assert ours.found_inf is False
        assert theirs.found_inf is False
        if check:
            torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-6, atol=0.0)
