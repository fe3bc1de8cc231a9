"""Loops that torch's GradScaler trains wrongly without a word: refused, or warned of once."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, Unchanged, give_grads, make_params
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from torch import nn
from torch.nn import Parameter

from apex_mp.amp import GradScaler
from apex_mp.core import readback
from apex_mp.optimizers import FusedAdam
from apex_mp.scale import device_scale

FUSED = {**OURS, "AdamW fused": OF_TORCH["AdamW fused"]}
each_fused = pytest.mark.parametrize("make", FUSED.values(), ids=[*FUSED])
each_optimizer = pytest.mark.parametrize(
    "make", [OURS["FusedAdam"], *OF_TORCH.values()], ids=["FusedAdam", *OF_TORCH]
)


def warned(call: Any) -> list[str]:
    """Return what a call warns of, all of it at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


# --- clip_grad_norm_, and a step that is not the scaler's.


@each_fused
def test_a_plain_step_of_gradients_that_clipping_left_scaled_is_refused(
    make: Any, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = make(params)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    scaler.clip_grad_norm_(optimizer, 0.5)
    wish = r"\.step: the gradients are still scaled, .* Call scaler\.step\(optimizer\) instead"
    with Unchanged(optimizer, [param.grad for param in params]):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=type(optimizer).__name__ + wish):
                optimizer.step()
    params[0].grad.add_(1.0)  # Nor if they are edited.
    with Unchanged(optimizer), pytest.raises(RuntimeError, match=wish):
        optimizer.step()


@each_fused
@pytest.mark.parametrize("end", ["step", "unscale_", "next iteration", "skipped step"])
def test_afterwards_a_plain_step_is_a_plain_step(make: Any, end: str, device: torch.device) -> None:
    params, theirs = make_params(device), make_params(device)
    optimizer, expected = make(params), make(theirs)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0, math.inf if end == "skipped step" else None)
    scaler.clip_grad_norm_(optimizer, math.inf)
    if end in ("step", "skipped step"):
        scaler.step(optimizer)
    elif end == "unscale_":
        scaler.unscale_(optimizer)
    if end != "unscale_":
        scaler.update()
    if end == "step":
        give_grads(theirs, 0)
        expected.step()
    if end != "unscale_":
        give_grads(params, 1)
    optimizer.step()
    give_grads(theirs, 0 if end == "unscale_" else 1)
    expected.step()
    for param, wanted in zip(params, theirs, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-6, atol=1e-6)


# --- The order of clip, step and update.


@each_fused
@pytest.mark.parametrize("then", ["step", "unscale_", "clip_grad_norm_"])
def test_an_update_between_clip_and_step_is_refused(
    make: Any, then: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = make(params)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.update()
    arguments = (1.0,) if then == "clip_grad_norm_" else ()
    wish = (
        r"scaler\.update\(\) was called between scaler\.clip_grad_norm_\(optimizer\) and the step "
        rf"of {type(optimizer).__name__}, .* clip_grad_norm_, step and update in this order"
    )
    with Unchanged(optimizer, [param.grad for param in params]):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=wish):
                getattr(scaler, then)(optimizer, *arguments)
        with pytest.raises(RuntimeError, match="still scaled"):
            optimizer.step()


def ones(params: list[Parameter]) -> list[torch.Tensor]:
    return [torch.ones_like(param) for param in params]


# --- A loss that was not scaled.


def unscaled_loops(scaler: Any, optimizer: Any, params: list[Parameter]) -> Any:
    """Take a step as it should be, and then as many as asked for without `scale`."""
    give_scaled(scaler, params, 0)
    scaler.step(optimizer)
    scaler.update()

    def steps(count: int) -> None:
        for _ in range(count):
            give_grads(params, 1)
            scaler.step(optimizer)
            scaler.update()

    return steps


@each_optimizer
def test_steps_without_a_scaled_loss_are_warned_of_once(make: Any, device: torch.device) -> None:
    params = make_params(device)
    optimizer = make(params)
    steps = unscaled_loops(new_scaler(device, init_scale=2.0**9), optimizer, params)
    (message,) = warned(lambda: steps(3))
    assert message.startswith(
        "GradScaler.step: scaler.scale(loss) was not called since the last scaler.update(), but "
        f"the gradients of {type(optimizer).__name__} are divided by the scale, 512. "
    )
    assert "scaler.scale(loss).backward() in each iteration" in message


@pytest.mark.parametrize("call", ["clip_grad_norm_", "unscale_"])
def test_gradients_that_are_unscaled_before_update_and_after_it_are_warned_of(
    call: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = OF_TORCH["SGD"](params)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    getattr(scaler, call)(optimizer, *([1.0] if call == "clip_grad_norm_" else []))
    scaler.update()
    (message,) = warned(lambda: scaler.step(optimizer))
    assert "scaler.scale(loss) was not called since the last scaler.update()" in message


# --- A float16 loss.


def half_loss(device: torch.device, *, wide: bool) -> tuple[torch.Tensor, Any]:
    model = nn.Linear(4, 3, device=device).half()
    logits = model(torch.ones(8, 4, dtype=F16, device=device))
    labels = torch.zeros(8, dtype=torch.long, device=device)
    loss = nn.functional.cross_entropy(logits.float() if wide else logits, labels)
    return loss, FusedAdam(model.parameters(), master_weights=True)


@pytest.mark.parametrize("several", [False, True])
def test_a_float16_loss_whose_gradient_is_inf_is_warned_of_once(
    several: bool, device: torch.device
) -> None:
    scaler = GradScaler(device.type)
    loss, _ = half_loss(device, wide=False)

    def scale() -> None:
        scaler.scale([torch.ones((), device=device), loss] if several else loss)

    (message,) = warned(lambda: (scale(), scale()))
    assert "the loss is float16 and the scale is 65536, which is inf in float16" in message
    assert "Compute the loss in float32, of outputs.float()" in message


@pytest.mark.parametrize("where", ["host", "device"])
@each_fused
def test_scaled_float16_gradients_that_torch_clips_to_0_are_warned_of_once(
    make: Any, where: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "device":
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
    weight = Parameter(torch.ones(1000, dtype=F16, device=device))
    optimizer = make([weight])
    scaler = new_scaler(device)

    def steps() -> None:
        for _ in range(2):
            scaler.scale(torch.zeros((), device=device))
            weight.grad = torch.full_like(weight, 4096.0)  # the norm is 129527
            assert nn.utils.clip_grad_norm_([weight], 1.0).isinf()
            scaler.step(optimizer)
            assert not scaler.step_was_skipped(optimizer)
            scaler.update()

    (message,) = [each for each in warned(steps) if "no float32 masters" not in each]
    assert f"all gradients of {type(optimizer).__name__} are 0 in this step" in message
    assert "call scaler.clip_grad_norm_(optimizer, max_norm) instead" in message
    assert "at the scale 1024" in message


@each_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_iteration_that_the_loop_gives_up_after_clipping_is_forgotten(
    make: Any, set_to_none: bool, device: torch.device
) -> None:
    params, theirs = make_params(device), make_params(device)
    optimizer, expected = make(params), make(theirs)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.update()
    optimizer.zero_grad(set_to_none)
    scale = scaler.get_scale()
    scaler.scale(sum((p * g).sum() for p, g in zip(params, ones(params), strict=True))).backward()
    assert params[0].grad.flatten()[0].item() == scale
    scaler.step(optimizer)
    for param, grad in zip(theirs, ones(theirs), strict=True):
        param.grad = grad
    expected.step()
    for param, wanted in zip(params, theirs, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-6, atol=1e-6)


@each_optimizer
def test_gradients_in_the_place_of_those_that_waited_have_the_present_scale(
    make: Any, device: torch.device
) -> None:
    params, theirs = make_params(device), make_params(device)
    optimizer, expected = make(params), make(theirs)
    other = Parameter(torch.ones(2, device=device))
    stepped = torch.optim.SGD([other], 0.1)
    scaler = new_scaler(device, init_scale=8.0, growth_interval=1)
    for number in range(2):
        optimizer.zero_grad()
        scaler.scale(sum(param.sum() for param in (*params, other))).backward()
        scaler.step(stepped)
        if number == 0:
            scaler.step(optimizer)
        scaler.update()
    scaler.scale(other.sum()).backward()
    for param in params:
        param.grad = torch.full_like(param, scaler.get_scale())
    scaler.step(optimizer)
    for _ in range(2):
        for param in theirs:
            param.grad = torch.ones_like(param)
        expected.step()
    for param, wanted in zip(params, theirs, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-6, atol=1e-6)


# --- Gradients that are unscaled in part.


def loss_of(model: nn.Module) -> torch.Tensor:
    weight = next(model.parameters())
    loss: torch.Tensor = model(torch.ones(2, 4, device=weight.device)).pow(2).mean()
    return loss


@pytest.mark.parametrize("unscale", ["clip_grad_norm_", "unscale_"])
@pytest.mark.parametrize("then", ["clip_grad_norm_", "step"])
@pytest.mark.parametrize("drop", [False, True], ids=["accumulated", "new"])
@each_optimizer
def test_a_backward_between_unscaling_and_update_is_refused(
    make: Any, drop: bool, then: str, unscale: str, device: torch.device
) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer, scaler = make(model.parameters()), GradScaler(device.type, init_scale=8.0)
    before = [param.detach().clone() for param in model.parameters()]
    arguments = {
        "clip_grad_norm_": (optimizer, 1.0),
        "unscale_": (optimizer,),
        "step": (optimizer,),
    }
    scaler.scale(loss_of(model)).backward()
    getattr(scaler, unscale)(*arguments[unscale])
    if drop:
        optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.update\(\)"):
        getattr(scaler, then)(*arguments[then])
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)
    # What the message asks for.
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(loss_of(model)).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    expected = torch.autograd.grad(loss_of(model), [*model.parameters()])
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(expected))
    scaler.step(optimizer)
    scaler.update()


@each_optimizer
def test_a_loss_that_was_scaled_before_unscaling_is_noticed(
    make: Any, device: torch.device
) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer, scaler = make(model.parameters()), GradScaler(device.type, init_scale=8.0)
    first, second = scaler.scale([loss_of(model), loss_of(model)])
    first.backward()
    scaler.unscale_(optimizer)
    second.backward()
    with pytest.raises(RuntimeError, match=r"scaler\.update\(\)"):
        scaler.step(optimizer)


@each_optimizer
def test_a_backward_of_others_and_edits_are_no_reason_to_refuse(
    make: Any, device: torch.device
) -> None:
    """Two models in turn, with gradients edited after the second loss was scaled."""
    models = [nn.Linear(4, 4).to(device) for _ in range(2)]
    optimizers = [make(model.parameters()) for model in models]
    scaler = GradScaler(device.type, init_scale=8.0)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(optimizer)
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def test_the_bounds_that_the_warning_names_help(device: torch.device) -> None:
    loss, optimizer = half_loss(device, wide=False)
    scaler = GradScaler(device.type, init_scale=2.0**15, max_scale=2.0**15, growth_interval=1)
    assert warned(lambda: scaler.scale(loss).backward()) == []
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.every_case
@pytest.mark.parametrize("where", ["host", "device"])
@each_optimizer
def test_some_gradients_of_0_are_no_reason_to_warn(
    make: Any, where: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "device":
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
    params = make_params(device)
    optimizer = make(params)
    scaler = new_scaler(device)
    for _ in range(2):
        give_scaled(scaler, params, 0)
        params[0].grad.zero_()
        assert warned(lambda: (scaler.step(optimizer), scaler.step_was_skipped(optimizer))) == []
        scaler.update()


# --- Two optimizers that accumulate over different numbers of backwards.


def accumulate(device: torch.device, interval: int, clear: str | None) -> GradScaler:
    """Step one optimizer in each iteration, the other in each second."""
    scaler = new_scaler(device, init_scale=8.0, growth_interval=interval)
    models = [nn.Linear(4, 1).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
    for number in range(6):
        optimizers[0].zero_grad()
        if clear in ("None", "zeros") and number % 2:
            optimizers[1].zero_grad(set_to_none=clear == "None")
        is_left_out = clear == "after the step" and number % 2 == 0
        losses = [loss_of(model) for model in models]
        scaler.scale(losses[0] if is_left_out else sum(losses)).backward()
        scaler.step(optimizers[0])
        if number % 2:
            scaler.step(optimizers[1])
            optimizers[1].zero_grad(set_to_none=clear != "after the step")
        scaler.update()
        readback.wait()  # On a GPU the numbers of a warning are on their way.
    return scaler


def test_gradients_of_two_scales_are_warned_of(device: torch.device) -> None:
    """The second optimizer is known from its first step on."""
    messages = warned(lambda: accumulate(device, interval=1, clear=None))
    expected = [
        f"gradients of SGD are sums of two scales: scaler.update() changed {a} to {b} between their"
        for a, b in [(32, 64), (128, 256)]
    ]
    assert len(messages) == 2
    assert all(text in message for text, message in zip(expected, messages, strict=True))


@pytest.mark.parametrize(
    ("interval", "clear"),
    [(100, None), (1, "None"), (1, "zeros"), (1, "after the step")],
    ids=["same scale", "to None", "to zeros", "to zeros after the step"],
)
def test_an_accumulation_at_one_scale_is_not(
    interval: int, clear: str | None, device: torch.device
) -> None:
    """Nor gradients that the loss of another model left, which are cleared before the next."""
    assert not warned(lambda: accumulate(device, interval, clear))
