"""What GradScaler refuses, and the bounds of its scale."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, Unchanged, give_grads, make_params
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from torch.nn import Parameter

from apex_mp import fp16_utils, optimizers
from apex_mp.amp import GradScaler
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedAdam

MAKES = {"FusedAdam": OURS["FusedAdam"], **{n: OF_TORCH[n] for n in ("SGD", "AdamW fused")}}


each_optimizer = pytest.mark.parametrize("make", MAKES.values(), ids=[*MAKES])


CALLS: dict[str, Any] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip_grad_norm_": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
}


each_call = pytest.mark.parametrize("call", CALLS.values(), ids=[*CALLS])


@each_call
@pytest.mark.parametrize("face", [fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer])
def test_an_fp16_optimizer_scales_by_itself(face: Any, call: Any, device: torch.device) -> None:
    params = make_params(device, F16)
    optimizer = face(FusedAdam(params), verbose=False)
    give_grads(params, 0)
    before = [param.grad.clone() for param in params]
    with pytest.raises(RuntimeError, match="FP16_Optimizer was given to a GradScaler, "):
        call(new_scaler(device), optimizer)
    for param, grad in zip(params, before, strict=True):
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("enabled", [True, False])
def test_clipping_parameters_instead_of_their_optimizer_is_refused(enabled: bool) -> None:
    scaler = GradScaler("cpu", enabled=enabled)
    wish = r"optimizer is a list; .*clip_grad_norm_\(optimizer, max_norm\)"
    with pytest.raises(TypeError, match=wish):
        scaler.clip_grad_norm_([Parameter(torch.ones(2))], 1.0)  # type: ignore[arg-type]


@each_optimizer
def test_unscaling_and_stepping_twice_are_refused_as_in_torch(
    make: Any, device: torch.device
) -> None:
    messages: list[list[str]] = []
    for cls in (GradScaler, torch.amp.GradScaler):
        params = make_params(device)
        optimizer = make(params)
        scaler = new_scaler(device, cls)
        give_scaled(scaler, params, 0)
        scaler.unscale_(optimizer)
        messages.append([])
        for call in (scaler.unscale_, None, scaler.step, scaler.unscale_):
            if call is None:
                scaler.step(optimizer)
                continue
            with pytest.raises(RuntimeError) as caught:
                call(optimizer)
            messages[-1].append(str(caught.value))
    assert messages[0] == messages[1]
    assert len(messages[0]) == 3


def test_an_error_in_torchs_fused_step_leaves_no_scale(device: torch.device) -> None:
    params = make_params(device)
    optimizer = OF_TORCH["AdamW fused"](params)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_that_is_refused_leaves_the_optimizer_as_it_was(
    clipped: bool, device: torch.device
) -> None:
    param = Parameter(torch.ones(3, device=device))
    optimizer = FusedAdam([param], lr=0.1)
    scaler = new_scaler(device)
    param.grad = torch.full((3,), 1024.0, device=device)
    if clipped:
        scaler.clip_grad_norm_(optimizer, 1.0)
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    with pytest.raises(ValueError, match="beta"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    if not clipped:
        param.grad = torch.full((3,), math.inf, device=device)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) == (not clipped)  # It has looked again.


@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
def test_an_fp16_optimizer_around_a_loop_that_a_scaler_scales_is_a_sentence(
    loss_scale: float, device: torch.device
) -> None:
    weight = Parameter(torch.ones(3, dtype=F16, device=device))
    optimizer = optimizers.FP16_Optimizer(FusedAdam([weight]), loss_scale, verbose=False)
    scaler = new_scaler(device)
    scaler.scale(weight.float().sum()).backward()
    if loss_scale == 1.0:  # Then backward() of the loss itself is right.
        optimizer.step()
    else:
        with pytest.warns(RuntimeWarning, match=r"do not come from optimizer\.backward\(loss\)"):
            optimizer.step()
    with pytest.raises(AssertionError, match="An FP16_Optimizer scales its loss itself: it needs"):
        scaler.update()


@pytest.mark.every_case
@each_call
@each_optimizer
def test_calls_before_the_first_loss_leave_nothing(
    make: Any, call: Any, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = make(params)
    give_grads(params, 0)
    scaler = GradScaler(device.type)
    with pytest.raises(AssertionError, match="but _scale is None"):
        call(scaler, optimizer)
    pickle.dumps(scaler)  # As with torch's, which refuses it while there is a step under way.


@each_optimizer
@pytest.mark.parametrize("given", ["by name", "by place"])
def test_closures_are_refused(given: str, make: Any, device: torch.device) -> None:
    params = make_params(device)
    optimizer = make(params)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)

    def closure() -> float:
        raise AssertionError("it was called")

    args, kwargs = ([closure], {}) if given == "by place" else ([], {"closure": closure})
    with (
        Unchanged(optimizer, [param.grad for param in params]),
        pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler"),
    ):
        scaler.step(optimizer, *args, **kwargs)
    scaler.step(optimizer, None)  # as accelerate calls it


BOUNDS: dict[str, dict[str, Any]] = {
    "min_scale": {"min_scale": 4.0},
    "max_scale": {"max_scale": 100.0},
    "hysteresis": {"hysteresis": 3},
    "all": {"min_scale": 3, "max_scale": 50.0, "hysteresis": 2},
}


each_bound = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=[*BOUNDS])


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
