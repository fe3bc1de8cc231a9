"""GradScaler says which steps were skipped and why, and a GPU is not waited for."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, make_params
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from several_devices_cases import step_unwaited
from torch import nn
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.amp import GradScaler
from apex_mp.amp._scale_loss.block import scaled_backward
from apex_mp.core import readback
from apex_mp.core.readback import Readback
from apex_mp.optimizers import FusedAdam
from apex_mp.scale import device_scale
from apex_mp.scale.amp_scaler import LossScaler

FUSED = {**OURS, "AdamW fused": OF_TORCH["AdamW fused"]}
OTHERS = {name: make for name, make in OF_TORCH.items() if name not in FUSED}
each_optimizer = pytest.mark.parametrize(
    "make", [*FUSED.values(), *OTHERS.values()], ids=[*FUSED, *OTHERS]
)


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


# --- Skipped or not.


@pytest.mark.parametrize("where", ["host", "device"])
@each_optimizer
def test_it_says_of_each_step_whether_it_was_skipped(
    make: Any, where: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if where == "device":
        request.getfixturevalue("left_alone")
    lists = [make_params(device), make_params(device)]
    optimizers = [make(params) for params in lists]
    scaler = new_scaler(device)
    none = (None, None)
    for step, bad in enumerate(
        [none, (math.inf, None), (None, math.nan), none, (-math.inf, math.inf)]
    ):
        for params, optimizer, value in zip(lists, optimizers, bad, strict=True):
            give_scaled(scaler, params, step, value)
            scaler.step(optimizer)
            assert scaler.step_was_skipped(optimizer) == (value is not None)
        scaler.update()
        for optimizer, value in zip(optimizers, bad, strict=True):
            assert scaler.step_was_skipped(optimizer) == (value is not None)


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


@each_optimizer
def test_the_report_names_parameters_and_counts(make: Any, device: torch.device) -> None:
    model = Net(device)
    optimizer = make(model.parameters())
    scaler = new_scaler(device, model=model)
    bad = {"first.bias": [math.nan], "second.weight": [math.inf, -math.inf]}
    overflow(scaler, optimizer, model, bad)
    assert [str(one) for one in scaler.overflow_report(optimizer)] == [
        "second.weight [1, 2]: 2 inf, 0 NaN",
        "first.bias [2]: 0 inf, 1 NaN",
    ]
    scaler.update()
    overflow(scaler, optimizer, model, {})
    assert len(scaler.overflow_report(optimizer)) == 2  # of the last skipped one
    assert not scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("where", ["host", "device"])
@each_optimizer
def test_fifty_skips_in_a_row_are_a_warning_that_names_the_worst(
    make: Any, where: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if where == "device":
        request.getfixturevalue("left_alone")
    model = Net(device)
    optimizer = make(model.parameters())
    scaler = new_scaler(device, init_scale=2.0**60, model=model)
    bad = {"first.bias": [math.nan], "second.weight": [math.inf, math.inf]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(120):
            overflow(scaler, optimizer, model, {} if step == 30 else bad)
            scaler.update()
            scaler.step_was_skipped(optimizer)
    (one,) = caught
    assert issubclass(one.category, RuntimeWarning)
    assert one.filename == __file__
    assert str(one.message).startswith(
        f"GradScaler: {type(optimizer).__name__} has skipped 50 steps in a row, from its step 32 "
        "on; the loss scale is now "
    )
    said = str(one.message)
    assert "The worst: second.weight [1, 2]: 2 inf, 0 NaN." in said
    assert said.endswith("[python -m apex_mp explain every-step-is-skipped]")


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


@pytest.mark.parametrize("make", OTHERS.values(), ids=[*OTHERS])
def test_clipping_leaves_inf_to_be_counted(make: Any, device: torch.device) -> None:
    model = Net(device)
    optimizer = make(model.parameters())
    scaler = new_scaler(device, model=model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model.second.weight.grad.fill_(math.inf)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert [str(one) for one in scaler.overflow_report(optimizer)] == [
        "second.weight [1, 2]: 2 inf, 0 NaN"
    ]


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


@pytest.mark.usefixtures("left_alone")
@pytest.mark.parametrize("way", ["zeros", "None", "unscale_, zeros", "unscale_, None"])
def test_gradients_that_were_cleared_are_named_without_counts(
    way: str, device: torch.device
) -> None:
    model = Net(device)
    optimizer = FusedAdam(model.parameters())
    scaler = new_scaler(device, model=model)
    if "unscale_" in way:
        step = scaler.step
        scaler.step = lambda each: (scaler.unscale_(each), step(each))
    overflow(scaler, optimizer, model, {"first.bias": [math.nan], "second.weight": [math.inf]})
    optimizer.zero_grad(set_to_none="None" in way)
    assert [str(one) for one in scaler.overflow_report(optimizer)] == [
        "first.bias [2]: inf or NaN",
        "second.weight [1, 2]: inf or NaN",
    ]


@pytest.mark.usefixtures("left_alone")
@pytest.mark.parametrize("way", ["step", "unscale_", "clip_grad_norm_", "scale_loss"])
def test_a_skipped_first_step_leaves_zeros_with_step_0(way: str, device: torch.device) -> None:
    model = Net(device)
    optimizer = FusedAdam(model.parameters())
    scaler, loss_scaler = new_scaler(device, model=model), LossScaler("dynamic")
    for bad in (True, True, False):
        factor = math.inf if bad else 1.0
        loss = sum(param.sum() for param in model.parameters()) * factor
        optimizer.zero_grad()
        if way == "scale_loss":
            with scaled_backward(loss, [optimizer], loss_scaler) as scaled:
                scaled.backward()
            optimizer.step()
            assert amp.step_was_skipped(optimizer) == bad
        else:
            scaler.scale(loss).backward()
            if way != "step":
                getattr(scaler, way)(optimizer, *([1.0] if way == "clip_grad_norm_" else []))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.step_was_skipped(optimizer) == bad
        assert {state["step"].item() for state in optimizer.state.values()} == {float(not bad)}
        assert bad == (not any(bool(s["exp_avg"].any()) for s in optimizer.state.values()))


def test_neither_optimizer_nor_model_is_kept_alive(device: torch.device) -> None:
    model = Net(device)
    optimizer = FusedAdam(model.parameters())
    scaler = GradScaler(device.type, model=model)
    scaler.scale(torch.ones((), device=device))
    overflow(scaler, optimizer, model, {"first.bias": [math.inf]})
    scaler.update()
    assert scaler.step_was_skipped(optimizer)
    dead = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
