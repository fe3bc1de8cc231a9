"""FusedAdam on several devices takes the step of one plan, and its host waits for nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    SHAPES,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    give_grads,
    make_params,
)
from plan_cases import KINDS, Run, fresh_grad, make_run, parameter
from several_devices_cases import count_of_plans, side_of, spread
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch.nn import Parameter
from waits import Waits

from apex_mp import _C
from apex_mp.core.device_scale import DeviceScale
from apex_mp.core.step import StepRequest, StepResult
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedAdam, _device_part, _several_devices
from apex_mp.optimizers._several_devices import Outcome, SeveralDevices

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_part, "device_of", side_of)


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


OPTION_SETS: dict[str, dict[str, Any]] = {
    "lr is a tensor": {"lr": torch.tensor(0.05)},
    "maximize": {"maximize": True},
    "L2": {"adam_w_mode": False, "eps_inside_sqrt": True},
}


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
def test_options_count_on_each_device(options: dict[str, Any]) -> None:
    params = [parameter(4), parameter(3), parameter(5), parameter(2)]
    groups = [{"params": params[:2], "weight_decay": 0.2}, {"params": params[2:]}]
    Run(spread(FusedAdam(groups, **{**OPTIONS, **options}))).train(3)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_split_masters_are_kept_on_each_device(dtype: torch.dtype, device: torch.device) -> None:
    options = {**OPTIONS, "master_weights": "split", "moment_dtype": BF16}
    params = make_params(device, dtype)
    twins = copies_of(params)
    optimizer, expected = spread(FusedAdam(params, **options)), FusedAdam(twins, **options)
    for step in range(4):
        give_grads(params, step, values=dtype)
        give_grads(twins, step, values=dtype)
        if step == 2:  # Two on different devices are written.
            with torch.no_grad():
                for param in (*params[:2], *twins[:2]):
                    param.add_(1.0)
            with pytest.warns(
                RuntimeWarning, match=r"params\[0\]\[0\] and 1 more parameters changed"
            ):
                optimizer.step()
            with pytest.warns(RuntimeWarning):
                expected.step()
        else:
            optimizer.step()
            expected.step()
    assert count_of_plans(optimizer) == 2
    assert_same_state(optimizer, expected)
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(optimizer.master(param), expected.master(twin))


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


@each_layout
def test_groups_may_lie_on_one_device_on_both_or_hold_nothing(
    layout: Callable[[], list[list[Parameter]]],
) -> None:
    run = Run(spread(make_optimizer(layout())))
    run.train(3)


def make_optimizer(groups: list[list[Parameter]], **options: Any) -> FusedAdam:
    """An optimizer whose groups differ in their learning rate."""
    return FusedAdam(
        [{"params": one, "lr": 0.05 / (i + 1)} for i, one in enumerate(groups)],
        weight_decay=0.1,
        **options,
    )


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_outputs_are_written_in_the_same_step(dtype: torch.dtype, device: torch.device) -> None:
    params = make_params(device)
    outputs = [torch.zeros_like(param, dtype=dtype) for param in params]
    outputs[2] = None  # type: ignore[call-overload]
    optimizer, expected = spread(FusedAdam(params, **OPTIONS)), FusedAdam(copies_of(params))
    expected.param_groups[0].update(OPTIONS)
    for step in range(3):
        grads = [fresh_grad(param, step, index) * 8.0 for index, param in enumerate(params)]
        optimizer.step(grads=grads, output_params=outputs, scale=8.0)
        expected.step(grads=grads, scale=8.0)
    assert_same_state(optimizer, expected)
    for param, output in zip(params, outputs, strict=True):
        assert output is None or torch.equal(output, param.detach().to(dtype))


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
        assert_same_trajectory(optimizer, params, expected, twins)
    if layout in (one_side_each, one_side_only):
        assert_same_state(optimizer, expected)


def test_norms_whose_squares_have_no_rounding_clip_to_the_bit(device: torch.device) -> None:
    shapes = [(4,), (3,), (5,), (2,)]
    params = [Parameter(torch.ones(shape, device=device)) for shape in shapes]
    optimizer, expected, params, twins = clipped_pair([params[:2], params[2:]])
    for one in (params, twins):
        for index, param in enumerate(one):
            param.grad = torch.full_like(param, 2.0**index)
    optimizer.step()
    expected.step()
    assert_same_state(optimizer, expected)


def test_groups_on_one_device_each_are_clipped_by_the_norm_of_all() -> None:
    optimizer, expected, params, twins = clipped_pair(one_side_each())
    for step in range(3):
        for one, own in ((optimizer, params), (expected, twins)):
            give_grads(own, step)
            one.step(grads=StepRequest(clip_by_global_norm=True))
    assert_same_trajectory(optimizer, params, expected, twins)


@pytest.mark.parametrize("limit", [0.0, 0.3], ids=["nobody clips", "on one device each"])
def test_what_no_group_shares_is_not_measured_beside_the_plans(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_several_devices, "_measure", None)
    groups = one_side_each() if limit else both_sides()
    optimizer = spread(make_optimizer(groups, max_grad_norm=limit))
    give_grads(all_of(groups), 0)
    optimizer.step()
    assert len(optimizer.state) == 4


def test_a_norm_that_is_given_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_several_devices, "_measure", None)
    optimizer, expected, params, twins = clipped_pair(both_sides())
    norms = [8.0, torch.tensor(4.0)]
    for one, own in ((optimizer, params), (expected, twins)):
        grads = [fresh_grad(param, 0, index) for index, param in enumerate(own)]
        one.step(grads=grads, scale=4.0, grad_norms=norms)
    assert_same_state(optimizer, expected)


def test_a_norm_that_is_not_given_is_measured_beside_one_that_is() -> None:
    optimizer, expected, params, twins = clipped_pair(both_sides())
    for one, own in ((optimizer, params), (expected, twins)):
        grads = [fresh_grad(param, 0, index) for index, param in enumerate(own)]
        one.step(grads=grads, scale=4.0, grad_norms=[8.0, None])
    assert_same_trajectory(optimizer, params, expected, twins)


SCALES: dict[str, Callable[[], Any]] = {
    "1": lambda: 1.0,
    "a number": lambda: 128.0,
    "a tensor": lambda: torch.tensor([[128.0]]),
}


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
            request = StepRequest(
                grads_of=lists, copies=lists, check=check, clip_by_global_norm=everywhere
            )
            outcomes.append(one.step(grads=request, scale=scale()).outcome)
    assert_same_trajectory(optimizer, params, expected, twins)
    for ours, theirs in zip(outcomes[:3], outcomes[3:], strict=True):
        assert ours.found_inf is False
        assert theirs.found_inf is False
        if check:
            torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_without_a_check_inf_and_nan_clip_as_with_one_plan(bad: float) -> None:
    optimizer, expected, params, twins = clipped_pair([[parameter(4), parameter(3)]])
    for one, own in ((optimizer, params), (expected, twins)):
        give_grads(own, 0)
        own[1].grad[0] = bad
        one.step()
    assert_same_state(optimizer, expected)
    assert params[0].isnan().all() or bad == float("inf")


# --- Overflows.


def result_of(optimizer: FusedAdam, **options: Any) -> StepResult:
    result: StepResult = optimizer.step(grads=StepRequest(check=True, **options))
    return result


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
    assert len(optimizer.state) == len(before.state)
    assert_same_state(optimizer, before)
    give_grads(params, 8)
    result = result_of(optimizer)
    assert result.outcome.found_inf is False
    assert {float(state["step"]) for state in optimizer.state.values()} == {steps_before + 1.0}


def test_norms_and_places_without_gradient_are_those_of_one_plan(device: torch.device) -> None:
    params = make_params(device)
    twins = copies_of(params)
    results = []
    for own in (params, twins):
        optimizer = make_optimizer([own[:3], own[3:]])
        if own is params:
            spread(optimizer)
        give_grads(own, 0, missing=lambda step, index: index in (1, 2, 5))
        results.append(result_of(optimizer))
    ours, theirs = results
    assert ours.without_grad == theirs.without_grad == [(0, 1), (0, 2), (1, 2)]
    assert ours.outcome.norms == pytest.approx(theirs.outcome.norms, rel=1e-6)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "found_inf", [1, torch.tensor(1.0), torch.tensor([2.0], dtype=F64), torch.tensor(True)]
)
def test_a_known_overflow_skips_with_a_check_and_without(found_inf: Any, check: bool) -> None:
    params = [parameter(4), parameter(3)]
    optimizer = FusedAdam(params)
    give_grads(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    plan: Any = spread(optimizer)._plan
    optimizer._read(plan, StepRequest(), 1.0, {})
    options = {"norms": None, "clip_by_global_norm": False, "loss_scale": None, "wait": True}
    outcome = plan.run(found_inf=found_inf, check=check, **options)
    assert outcome.found_inf
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old)


@pytest.mark.parametrize(
    ("found_inf", "flag"),
    [(0, 0.0), (3.0, 1.0), (torch.tensor([[2]]), 1.0), (torch.zeros(1, dtype=F64), 0.0)],
)
def test_each_plan_gets_found_inf_in_one_form(found_inf: Any, flag: float) -> None:
    # A plan on CUDA refuses float64, one on the CPU does not.
    assert_same_bits(_several_devices.as_flag(found_inf, "FusedAdam"), torch.tensor(flag))


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_grad_scaler_unscales_and_skips_on_all_devices(
    max_grad_norm: float, device: torch.device
) -> None:
    params = make_params(device)
    twins = copies_of(params)
    options = {**OPTIONS, "max_grad_norm": max_grad_norm, "eps": 1e-3}
    optimizers = spread(FusedAdam(params, **options)), FusedAdam(twins, **options)
    scalers = [
        torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3) for _ in range(2)
    ]
    for step in range(12):
        for own, optimizer, scaler in zip((params, twins), optimizers, scalers, strict=True):
            scaler.scale(torch.zeros((), device=device))
            give_grads(own, step, factor=scaler.get_scale())
            if step in (0, 4, 5):
                own[step % 2].grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for param, twin in zip(params, twins, strict=True):
            assert_same_bits(param.grad, twin.grad)  # unscaled, unless the step was skipped
    assert_same_trajectory(optimizers[0], params, optimizers[1], twins)
    assert float(optimizers[0].state[params[0]]["step"]) == 9.0
    if not max_grad_norm:
        assert_same_state(*optimizers)


def test_a_scaler_that_skips_the_first_step_leaves_state_as_with_one_plan() -> None:
    states = []
    for make in (spread, lambda optimizer: optimizer):
        params = [parameter(4), parameter(3)]
        optimizer = make(FusedAdam(params))
        give_grads(params, 0)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        states.append(len(optimizer.state))
    assert states == [0, 0]


# --- The host waits for nothing.


def plain_step(optimizer: FusedAdam, device: torch.device) -> None:
    optimizer.step()


def step_in_a_scaler(optimizer: FusedAdam, device: torch.device) -> None:
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.grad_scale = torch.full((), 8.0, device=device)
    optimizer.step()


def clip_by_the_norm_of_all(optimizer: FusedAdam, device: torch.device) -> None:
    scale = torch.full((1,), 8.0, device=device)
    optimizer.step(grads=StepRequest(clip_by_global_norm=True), scale=scale)


def check_before(optimizer: FusedAdam, device: torch.device) -> None:
    scale = DeviceScale(DynamicLossScale(), device)
    request = StepRequest(check=True, wait=False, loss_scale=scale)
    result = optimizer.step(grads=request, scale=scale.scale)
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


def test_the_state_is_made_in_the_order_of_the_parameters(device: torch.device) -> None:
    params = make_params(device)
    optimizer = spread(FusedAdam(params))
    give_grads(params, 0)
    optimizer.step()
    assert all(one is other for one, other in zip(optimizer.state, params, strict=True))


def test_pickle_and_deepcopy_drop_the_plans_and_train_on() -> None:
    params = [parameter(4), parameter(3)]
    optimizer = spread(FusedAdam(params, **OPTIONS))
    give_grads(params, 0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "_plan" not in vars(other)
        Run(spread(other)).train(2)
    Run(optimizer).train(2)


def test_parameters_that_come_to_one_device_get_one_plan_again() -> None:
    params = [parameter(4), parameter(3)]
    run = Run(spread(FusedAdam(params, **OPTIONS)))
    run.train(2)
    assert count_of_plans(run.optimizer) == 2
    param = run.params[1]
    param.grad, param.data = None, torch.ones(4)
    del run.optimizer.state[param]
    run.train(2)
    assert type(run.optimizer._plan) is _C.StepPlan


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
    assert isinstance(optimizer._plan, SeveralDevices)
    del optimizer.param_groups[0]["params"][0]
    assert_same_state(optimizer, expected)


def test_nothing_but_parameters_without_a_gradient_is_no_mistake() -> None:
    param = Parameter(torch.ones(3, device="meta"), requires_grad=False)
    optimizer = FusedAdam([param])
    param.requires_grad_()
    for check in (False, True):
        result = optimizer.step(grads=StepRequest(check=check))
        assert result.outcome == Outcome(False, [])
        assert result.without_grad == [(0, 0)]


def test_refreshing_hyperparameters_changes_no_number() -> None:
    run = Run(spread(FusedAdam([parameter(4), parameter(3)], **OPTIONS)))
    for _ in range(3):
        run.train(1)
        run.group["lr"] *= 0.5
        run.optimizer.refresh_hyperparameters()
    run.train(1)


def test_each_plan_is_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(spread(FusedAdam([parameter(4), parameter(3)], **OPTIONS)))
    run.train(1)
    refreshed = []

    class Plan:
        def __init__(self, plan: _C.StepPlan) -> None:
            self.plan = plan

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plan, name)

        def refresh_groups(self) -> None:
            refreshed.append(self.plan)

    several: Any = run.optimizer._plan
    plans = [*several._plans.values()]
    several._plans = {device: Plan(plan) for device, plan in several._plans.items()}
    run.optimizer.refresh_hyperparameters()
    assert refreshed == plans


# --- Real devices.

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
