"""FusedAdam as a torch optimizer: schedulers, hooks, closures, compiled models, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    F16,
    F64,
    OVERFLOWS,
    Optimizer,
    Unchanged,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    give_grads,
    make_params,
    make_scaler,
    scaled_step,
    train,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_same_bits
from torch.nn import Parameter
from torch.optim import lr_scheduler

from apex_mp.optimizers import FusedAdam

# --- Schedulers


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 50, cycle_momentum=True),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "warmup, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.9)], [10]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_schedule_gives_the_trajectory_of_torch(
    make_scheduler: Callable[[Optimizer], Any], tensor_lr: bool, device: torch.device
) -> None:
    def lr() -> Any:
        return torch.tensor(0.05, dtype=F64) if tensor_lr else 0.05

    params = make_params(device)
    expected_params = copies_of(params, F64)
    optimizer = FusedAdam(params, lr=lr(), weight_decay=0.1)
    expected = torch.optim.AdamW(expected_params, lr=lr(), weight_decay=0.1, foreach=False)
    seen = set()
    for one, ones in ((optimizer, params), (expected, expected_params)):
        scheduler = make_scheduler(one)
        for step in range(50):
            train(one, ones, [step])
            seen.add((float(one.param_groups[0]["lr"]), one.param_groups[0]["betas"]))
            if step < 49:
                scheduler.step()
    assert len(seen) > 5  # the schedule did something
    assert_same_trajectory(
        optimizer, params, expected, expected_params, TRAJECTORY_TOLERANCES[params[0].dtype]
    )


# --- Hooks, closures, zero_grad


def test_zero_grad_sets_gradients_to_none_unless_asked_to_zero_them(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params, set_grad_none=False)
    give_grads(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert [float(p.grad.abs().sum()) for p in params] == [0.0] * len(params)
    optimizer.zero_grad()
    assert [p.grad for p in params] == [None] * len(params)


# --- Autograd


def test_backward_through_a_low_precision_copy_that_the_step_has_written_raises(
    device: torch.device,
) -> None:
    param = Parameter(torch.ones(3, device=device).half())
    optimizer = FusedAdam([param], master_weights=True)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- torch.compile


def a_model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(
        device
    )


def losses_of(
    model: torch.nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    optimizer: Optimizer,
    device: torch.device,
    step: Callable[[], object] | None = None,
) -> torch.Tensor:
    torch.manual_seed(4)
    inputs, losses = torch.randn(32, 4, device=device), []
    targets = inputs.sum(1, keepdim=True).sin()
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        (step or optimizer.step)()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_a_compiled_function_that_steps_is_not_compiled_anew_when_lr_changes(
    device: torch.device,
) -> None:
    torch._dynamo.reset()
    compilations = []

    def backend(module: Any, inputs: Any) -> Any:
        compilations.append(module)
        return module.forward

    plain, model = a_model(device), a_model(device)
    expected_optimizer = FusedAdam(plain.parameters(), lr=0.05)
    optimizer = FusedAdam(model.parameters(), lr=0.05)

    def halve_lr_and_step(one: FusedAdam) -> None:
        one.param_groups[0]["lr"] *= 0.9
        one.step()

    expected = losses_of(
        plain, plain, expected_optimizer, device, lambda: halve_lr_and_step(expected_optimizer)
    )
    step = torch.compile(lambda: optimizer.step(), backend=backend)

    def compiled_step() -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        step()

    actual = losses_of(model, model, optimizer, device, compiled_step)
    assert_same_bits(actual, expected)
    assert not compilations


OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_trajectory_is_that_of_torch_under_the_same_overflows(
    bad: float, device: torch.device
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer = FusedAdam(params, **OPTIONS)
    expected = torch.optim.AdamW(expected_params, fused=True, **OPTIONS)
    scaler, expected_scaler = make_scaler(device), make_scaler(device)
    scales = []
    for step in range(40):
        now = bad if step in OVERFLOWS else None
        scale = scaled_step(scaler, optimizer, params, step, bad=now)
        assert scale == scaled_step(expected_scaler, expected, expected_params, step, bad=now)
        scales.append(scale)
    assert_same_trajectory(optimizer, params, expected, expected_params)
    assert int(optimizer.state[params[0]]["step"]) == 40 - len(OVERFLOWS)
    assert min(scales) < 2.0**10 < max(scales)  # it both backed off and grew


@pytest.mark.cpu_only  # On CUDA the host does not know that the step is skipped.
def test_a_skipped_step_does_not_invalidate_a_graph(device: torch.device) -> None:
    # Nothing was written, so backward through the old weights is right.
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = FusedAdam([param]), make_scaler(device)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    param.grad.fill_(math.inf)
    scaler.step(optimizer)
    param.grad = None
    loss.backward()
    assert param.grad.tolist() == [2.0] * 3


def test_grads_of_ones_own_are_refused_because_nobody_has_checked_them(
    device: torch.device,
) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    give_grads(params, 0)
    bad = [torch.full_like(p, math.inf) for p in params]
    with Unchanged(optimizer), pytest.raises(ValueError, match="grads was given inside GradScaler"):
        make_scaler(device).step(optimizer, grads=bad)


def test_the_legacy_scale_multiplies_that_of_grad_scaler(device: torch.device) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    outputs = [torch.zeros_like(p, dtype=F16) for p in params]
    optimizer, expected = FusedAdam(params), FusedAdam(expected_params)
    scaler = make_scaler(device)
    give_grads(params, 0, factor=1024.0 * 8.0)
    scaler.step(optimizer, scale=8.0, output_params=outputs)
    give_grads(expected_params, 0)
    expected.step()
    assert_same_state(optimizer, expected)
    for output, param in zip(outputs, params, strict=True):
        assert_same_bits(output, param.detach().half())


def test_after_an_error_in_grad_scaler_the_next_step_is_right(device: torch.device) -> None:
    """torch removes `grad_scale` only after a step without one, and multiplies the next by it."""
    param = Parameter(torch.ones(3, device=device))
    optimizer = FusedAdam([param], lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    optimizer.param_groups[0]["eps"] = -1.0
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match="eps is -1"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state[param]["exp_avg"].tolist() == pytest.approx([0.1] * 3)
