"""What GradScaler refuses or warns of beside the order of calls, and the bounds of its scale."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
import warnings
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, Unchanged, give_grads, make_params
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from torch import nn
from torch.nn import Parameter

from apex_mp import fp16_utils, optimizers
from apex_mp.amp import GradScaler
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedAdam
from apex_mp.scale import device_scale

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


# --- A loss that was not scaled.


@pytest.mark.every_case
@each_call
@each_optimizer
def test_the_first_loss_that_was_not_scaled_is_refused_and_leaves_nothing(
    make: Any, call: Any, device: torch.device
) -> None:
    params = make_params(device)
    optimizer, scaler = make(params), GradScaler(device.type)
    give_grads(params, 0)
    with pytest.raises(AssertionError) as caught:
        call(scaler, optimizer)
    (name,) = [each for each in CALLS if CALLS[each] is call]
    assert f"Attempted {name} but _scale is None" in str(caught.value)
    assert str(caught.value).endswith(
        f"GradScaler.{name}: scaler.scale(loss) was not called before, but the gradients of "
        f"{type(optimizer).__name__} are divided by the scale, 65536. Call "
        "scaler.scale(loss).backward() in each iteration, and scaler.update() once at its end"
    )
    pickle.dumps(scaler)  # As with torch's, which refuses it while there is a step under way.


def warned(call: Any) -> list[str]:
    """Return what a call warns of, all of it at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


@each_optimizer
def test_later_ones_are_warned_of_once(make: Any, device: torch.device) -> None:
    params = make_params(device)
    optimizer, scaler = make(params), new_scaler(device, init_scale=2.0**9)

    def steps(scaled: bool) -> None:
        for _ in range(3):
            (give_scaled if scaled else lambda _, *args: give_grads(*args))(scaler, params, 1)
            scaler.step(optimizer)
            scaler.update()

    assert warned(lambda: steps(True)) == []
    (message,) = warned(lambda: steps(False))
    assert message.startswith(
        "GradScaler.step: scaler.scale(loss) was not called since the last scaler.update(), but "
        f"the gradients of {type(optimizer).__name__} are divided by the scale, 512. "
    )
    assert "scaler.scale(loss).backward() in each iteration" in message


@pytest.mark.parametrize("call", [CALLS["clip_grad_norm_"], CALLS["unscale_"]])
def test_gradients_that_are_unscaled_before_update_and_after_it_are_warned_of(
    call: Any, device: torch.device
) -> None:
    params = make_params(device)
    optimizer, scaler = MAKES["SGD"](params), new_scaler(device)
    give_scaled(scaler, params, 0)
    call(scaler, optimizer)
    scaler.update()
    (message,) = warned(lambda: scaler.step(optimizer))
    assert "scaler.scale(loss) was not called since the last scaler.update()" in message


# --- A float16 loss, and float16 gradients that are scaled.


def half_loss(device: torch.device) -> tuple[torch.Tensor, Any]:
    model = nn.Linear(4, 3, device=device).half()
    logits = model(torch.ones(8, 4, dtype=F16, device=device))
    loss = nn.functional.cross_entropy(logits, torch.zeros(8, dtype=torch.long, device=device))
    return loss, FusedAdam(model.parameters(), master_weights=True)


@pytest.mark.parametrize("several", [False, True])
def test_a_float16_loss_whose_gradient_is_inf_is_warned_of_once(
    several: bool, device: torch.device
) -> None:
    scaler = GradScaler(device.type)
    loss, _ = half_loss(device)
    outputs: Any = [torch.ones((), device=device), loss] if several else loss
    (message,) = warned(lambda: (scaler.scale(outputs), scaler.scale(outputs)))
    assert "the loss is float16 and the scale is 65536, which is inf in float16" in message
    assert "Compute the loss in float32, of outputs.float()" in message


def test_the_bounds_that_the_warning_names_help(device: torch.device) -> None:
    loss, optimizer = half_loss(device)
    scaler = GradScaler(device.type, init_scale=2.0**15, max_scale=2.0**15, growth_interval=1)
    assert warned(lambda: scaler.scale(loss).backward()) == []
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.every_case
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("zeros", ["all", "some"])
@each_optimizer
def test_scaled_float16_gradients_that_torch_clips_to_0_are_warned_of_once(
    make: Any, zeros: str, where: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "device":
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
    weight, other = Parameter(torch.ones(1000, dtype=F16, device=device)), make_params(device)[0]
    optimizer, scaler = make([weight, other]), new_scaler(device)

    def steps() -> None:
        for _ in range(2):
            scaler.scale(torch.zeros((), device=device))
            weight.grad = torch.full_like(weight, 4096.0)  # the norm is 129527
            assert nn.utils.clip_grad_norm_([weight], 1.0).isinf()
            other.grad = None if zeros == "all" else torch.ones_like(other)
            scaler.step(optimizer)
            assert not scaler.step_was_skipped(optimizer)
            scaler.update()

    messages = [each for each in warned(steps) if "no float32 masters" not in each]
    # Of an optimizer that is not fused the norm is not known.
    assert len(messages) == (zeros == "all" and make is not MAKES["SGD"])
    for message in messages:
        assert f"all gradients of {type(optimizer).__name__} are 0 in this step" in message
        assert "call scaler.clip_grad_norm_(optimizer, max_norm) instead" in message
        assert "at the scale 1024" in message


# --- What the constructor, `step` and `load_state_dict` are given.


@pytest.mark.parametrize("device", ["gpu", "CPU", "mps", "xpu", None, 3])
def test_another_device_is_refused(device: Any) -> None:
    wish = r'GradScaler: device is .*; it must be "cuda" or "cpu"'
    with pytest.raises(ValueError, match=wish):
        GradScaler(device)
    assert not GradScaler(device, enabled=False).is_enabled()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_may_be_an_object_and_have_an_index(device: Any) -> None:
    assert repr(GradScaler(device)).startswith("GradScaler('cpu', scale=65536.0")


@pytest.mark.parametrize("processes", [1, 2])
def test_what_fsdp1_has_divided_is_refused_by_name(
    processes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    weight = Parameter(torch.ones(2, device=device))
    weight._fsdp_flattened = True  # type: ignore[attr-defined]
    optimizer, scaler = MAKES["SGD"]([weight]), new_scaler(device)
    weight.grad = torch.ones_like(weight)
    wish = "SGD steps parameters of a FullyShardedDataParallel"
    with pytest.raises(RuntimeError, match=wish) if processes > 1 else contextlib.nullcontext():
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            {"loss_scale": 8.0, "unskipped": 3},
            ValueError,
            r"keys \['scale', 'growth_factor', 'backoff_factor', 'growth_interval', "
            r"'_growth_tracker'\] are missing; the dict has \['loss_scale', 'unskipped'\]",
        ),
        ({"scale": 8.0}, ValueError, r"keys \['growth_factor', .*'_growth_tracker'\] are missing"),
        ([1], TypeError, r"GradScaler\.load_state_dict: .* is a list"),
    ],
)
def test_the_state_of_something_else_is_named(
    state: Any, error: type[Exception], message: str, device: torch.device
) -> None:
    scaler = new_scaler(device, min_scale=2.0)
    before = scaler.state_dict()
    with pytest.raises(error, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


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
