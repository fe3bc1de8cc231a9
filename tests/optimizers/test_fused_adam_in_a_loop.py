"""FusedAdam as a torch optimizer: schedulers, hooks, closures, compiled models, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    F64,
    Optimizer,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    give_grads,
    make_params,
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


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_runs_with_grad_before_the_step_and_its_loss_is_returned(
    keyword: bool, device: torch.device
) -> None:
    params = make_params(device, shapes=[(3,)])
    expected_params = copies_of(params)
    before = (params[0] ** 2).sum().item()
    optimizer, expected = FusedAdam(params, lr=0.1), FusedAdam(expected_params, lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    expected_params[0].grad = 2 * expected_params[0].detach()
    expected.step()
    assert loss.item() == pytest.approx(before)
    assert_same_state(optimizer, expected)


def test_zero_grad_sets_gradients_to_none_unless_told_to_zero_them(device: torch.device) -> None:
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
