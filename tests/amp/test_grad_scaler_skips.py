"""GradScaler says which steps were skipped and why, and a GPU is not waited for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, make_params
from grad_scaler_cases import give_scaled, new_scaler
from several_devices_cases import step_unwaited
from torch import nn
from torch.nn import Parameter

from apex_mp.core import readback
from apex_mp.core.readback import Readback
from apex_mp.optimizers import FusedAdam
from apex_mp.scale import device_scale


@pytest.fixture
def left_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat the device as one that the host does not wait for; nothing arrives before it does."""
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(Readback, "has_arrived", lambda self: False)
    if device.type == "cpu":  # Where the host knows the outcome.
        step_unwaited(monkeypatch)
    yield
    readback._pending.clear()


def take_step(
    scaler: Any, optimizer: Any, params: list[Parameter], step: int = 0, bad: float | None = None
) -> None:
    give_scaled(scaler, params, step, bad)
    scaler.step(optimizer)
    scaler.update()


# --- Why.


class Net(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, device=device), nn.Linear(2, 1, device=device)


def overflow(scaler: Any, optimizer: Any, model: nn.Module, values: dict[str, list[float]]) -> None:
    scaler.scale(torch.zeros((), device=next(model.parameters()).device))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for name, bad in values.items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad.view(-1)[: len(bad)] = torch.tensor(bad, device=grad.device)
    scaler.step(optimizer)


# --- Whose.


def test_an_optimizer_that_was_not_stepped_is_a_sentence(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    scaler = new_scaler(device)
    for ask in (scaler.step_was_skipped, scaler.overflow_report):
        with pytest.raises(RuntimeError, match=r"this FusedAdam was not stepped by scaler\.step"):
            ask(optimizer)


def test_parameters_without_masters_are_reported_once(device: torch.device) -> None:
    model = Net(device).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-14)
    scaler = new_scaler(device, model=model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)  # whose neighbours are 2**-11 and 2**-10 away
        model.first.weight.zero_()

    def step() -> None:
        scaler.scale(torch.zeros((), device=device))
        for param in model.parameters():
            param.grad = torch.full_like(param, 1024.0)
        model.second.weight.grad.zero_()
        scaler.step(optimizer)
        scaler.update()

    with pytest.warns(RuntimeWarning) as caught:
        step()
    (one,) = caught
    assert one.filename == __file__
    assert "SGD steps 4 parameters of float16 that have no float32 masters" in str(one.message)
    assert "first.weight, first.bias, second.weight, ..." in str(one.message)
    assert "FusedAdam(..., master_weights=True)" in str(one.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


@pytest.mark.parametrize("kind", ["float32", "masters", "frozen"])
def test_parameters_that_need_no_masters_are_not_reported(kind: str, device: torch.device) -> None:
    params = make_params(device, torch.float32 if kind == "float32" else F16)
    for param in params:
        param.requires_grad_(kind != "frozen")
    optimizer = FusedAdam(params, master_weights=kind == "masters")
    scaler = new_scaler(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(scaler, optimizer, params)


@pytest.mark.usefixtures("left_alone")
def test_of_steps_in_a_graph_the_device_is_asked_each_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = [make_params(device), make_params(device)]
    optimizers = [FusedAdam(params) for params in lists]
    scaler = new_scaler(device)
    for params, optimizer in zip(lists, optimizers, strict=True):
        give_scaled(scaler, params, 0)
        scaler.step(optimizer)
    scaler.update()
    with monkeypatch.context() as patch:
        patch.setattr(readback, "is_capturing", lambda: True)
        for params, optimizer, bad in zip(lists, optimizers, (None, math.inf), strict=True):
            give_scaled(scaler, params, 1, bad)
            scaler.step(optimizer)
        scaler.update()
    assert [*map(scaler.step_was_skipped, optimizers)] == [False, True]
    give_scaled(scaler, lists[1], 2)
    scaler.step(optimizers[1])
    assert not scaler.step_was_skipped(optimizers[1])


@pytest.mark.usefixtures("left_alone")
def test_gradients_that_came_since_are_not_taken_for_those_of_the_step(
    device: torch.device,
) -> None:
    model = Net(device)
    optimizer = FusedAdam(model.parameters())
    scaler = new_scaler(device, model=model)
    overflow(scaler, optimizer, model, {"first.bias": [math.nan]})
    for param in model.parameters():
        param.grad = torch.full_like(param, math.inf)
    assert [str(one) for one in scaler.overflow_report(optimizer)] == ["first.bias [2]: inf or NaN"]
