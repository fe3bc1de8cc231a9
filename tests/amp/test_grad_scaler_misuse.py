"""What a GradScaler cannot do gets a sentence, and changes nothing."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, Unchanged, assert_same_state, copies_of, give_grads, make_params
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from torch.nn import Parameter

from apex_mp import amp, fp16_utils, optimizers, parallel
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

MAKES = {"FusedAdam": OURS["FusedAdam"], "SGD": OF_TORCH["SGD"]}
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


@each_call
@pytest.mark.usefixtures("amp_off")
def test_an_optim_wrapper_scales_by_itself(call: Any, device: torch.device) -> None:
    handle = amp.init(device_type=device.type)
    wrapper = handle.wrap_optimizer(torch.optim.SGD(make_params(device), lr=0.1))
    with pytest.raises(RuntimeError, match="An OptimWrapper was given to a GradScaler, "):
        call(new_scaler(device), wrapper)


@pytest.mark.parametrize("enabled", [True, False])
def test_clipping_parameters_instead_of_their_optimizer_is_refused(enabled: bool) -> None:
    scaler = GradScaler("cpu", enabled=enabled)
    wish = r"optimizer is a list; .*clip_grad_norm_\(optimizer, max_norm\)"
    with pytest.raises(TypeError, match=wish):
        scaler.clip_grad_norm_([Parameter(torch.ones(2))], 1.0)  # type: ignore[arg-type]


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"GradScaler: model is a list; it must be a torch\.nn\.Mod"
    ):
        GradScaler("cpu", model=[Parameter(torch.ones(2))])  # type: ignore[arg-type]


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


def test_an_optimizer_that_owns_nothing_of_the_loss_is_a_sentence(device: torch.device) -> None:
    used, unused = make_params(device), make_params(device)
    optimizer, other = torch.optim.SGD(used, lr=0.1), torch.optim.SGD(unused, lr=0.1)
    scaler = new_scaler(device)
    give_scaled(scaler, used, 0)
    message = (
        r"No inf checks were recorded for this optimizer\. No parameter of this SGD has a "
        r"gradient: it must own parameters that the scaled loss depends on, and zero_grad\(\) must"
    )
    with Unchanged(other), pytest.raises(AssertionError, match=message):
        scaler.step(other)
    scaler.step(optimizer)
    scaler.update()


def test_an_assertion_of_the_users_passes(device: torch.device) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise AssertionError("mine")

    params = make_params(device)
    optimizer = Failing(params, lr=0.1)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    with pytest.raises(AssertionError, match=r"^mine$"):
        scaler.step(optimizer)


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


def test_an_optimizers_own_grad_scale_is_multiplied_as_in_torch(device: torch.device) -> None:
    params, theirs = make_params(device), make_params(device)
    optimizer, expected = FusedAdam(params), FusedAdam(theirs)
    scaler = new_scaler(device)
    give_grads(params, 0, factor=2.0**13)
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    scaler.step(optimizer)
    give_grads(theirs, 0)
    expected.step()
    assert_same_state(optimizer, expected)


def test_larc_is_stepped_with_unscaled_gradients(device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    optimizer = parallel.LARC(torch.optim.SGD(params, lr=0.1))
    expected = parallel.LARC(torch.optim.SGD(theirs, lr=0.1))
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    scaler.clip_grad_norm_(optimizer, math.inf)
    scaler.step(optimizer)
    give_grads(theirs, 0)
    expected.step()
    for param, wanted in zip(params, theirs, strict=True):
        assert torch.equal(param, wanted)
    assert not scaler.step_was_skipped(optimizer)


@each_optimizer
def test_a_step_that_was_replaced_is_called_as_it_is(make: Any, device: torch.device) -> None:
    # As accelerate and schedulers do; accelerate's takes whatever it is given.
    params, theirs = make_params(device), make_params(device)
    optimizer, expected = make(params), make(theirs)
    calls = []
    method = optimizer.step

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return method(*args, **kwargs)

    optimizer.step = patched
    scaler, plain = new_scaler(device), new_scaler(device, torch.amp.GradScaler)
    for step, bad in enumerate([None, math.inf, None]):
        for each, own, its in ((scaler, optimizer, params), (plain, expected, theirs)):
            give_scaled(each, its, step, bad)
            each.step(own, None)
            each.update()
    assert_same_state(optimizer, expected)
    assert calls == [((None,), {})] * (3 if make is MAKES["FusedAdam"] else 2)


def test_a_scaler_beside_an_fp16_optimizer_is_a_sentence(device: torch.device) -> None:
    weight = Parameter(torch.ones(3, dtype=F16, device=device))
    optimizer = optimizers.FP16_Optimizer(FusedAdam([weight]), verbose=False)
    scaler = new_scaler(device)
    optimizer.backward(scaler.scale(weight.float().sum()))
    optimizer.step()
    with pytest.raises(AssertionError, match="An FP16_Optimizer scales its loss itself: it needs"):
        scaler.update()


@pytest.mark.parametrize("bad", [None, "plain", "with gaps", "both"])
def test_a_fused_step_of_torch_checks_gradients_of_any_layout(
    bad: str | None, device: torch.device
) -> None:
    params = [Parameter(torch.ones(2, 3, device=device)) for _ in range(2)]
    for param, kind in zip(params, ("plain", "with gaps"), strict=True):
        grad = torch.full((2, 6), 1024.0, device=device)
        if bad in (kind, "both"):
            grad[0, 0] = math.inf
        param.grad = grad[:, ::2] if kind == "with gaps" else grad[:, :3].contiguous()
    optimizer = torch.optim.SGD(params, lr=0.5, fused=True)
    scaler = new_scaler(device)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) == (bad is not None)
    expected = 1.0 if bad else 0.5
    assert [param.tolist() for param in params] == [[[expected] * 3] * 2] * 2
    scaler.update()
    assert scaler.get_scale() == (512.0 if bad else 1024.0)


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


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("max_norm", [math.nan, -1.0])
def test_a_norm_to_clip_to_is_0_or_more_also_after_unscale(
    max_norm: float, unscaled: bool, device: torch.device
) -> None:
    weight = Parameter(torch.zeros(4, device=device))
    optimizer, scaler = FusedAdam([weight]), new_scaler(device)
    scaler.scale(weight.sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    before = weight.grad.tolist()
    with pytest.raises(ValueError, match=f"max_norm is {max_norm}; it must be 0 or more"):
        scaler.clip_grad_norm_(optimizer, max_norm)
    assert weight.grad.tolist() == before


@pytest.mark.parametrize("given", [None, torch.nn.Linear(1, 1)])
@pytest.mark.parametrize("method", ["step", "unscale_", "step_was_skipped", "overflow_report"])
def test_what_is_no_optimizer_is_a_sentence(method: str, given: Any, device: torch.device) -> None:
    scaler = new_scaler(device)
    scaler.scale(torch.ones((), device=device))
    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"GradScaler\.{method}: optimizer is a {kind}; it must"):
        getattr(scaler, method)(given)


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
