"""FP16_Optimizer on a device that the host does not wait for: what it hears, and when."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import on_cuda_kernels
import pytest
import torch
from fp16_cases import F16, F32, FACES, INF, NAN, everything, parameter, pull
from waits import Waits

from apex_mp import fp16_utils
from apex_mp.core import readback
from apex_mp.optimizers import FusedAdam, FusedSGD
from apex_mp.scale import device_scale
from apex_mp.scale.fp16_scalers import DynamicLossScaler

SHIM = on_cuda_kernels.SHIM
UTILS = fp16_utils.FP16_Optimizer
DYNAMIC: dict[str, Any] = {
    "dynamic_loss_scale": True,
    "dynamic_loss_args": {"init_scale": 1024.0, "scale_window": 3, "hysteresis": 2},
}
scalings = pytest.mark.parametrize(
    "scaling", [{"static_loss_scale": 128.0}, DYNAMIC], ids=["static", "dynamic"]
)


DAMPENED = {"lr": 0.1, "momentum": 0.5, "dampening": 0.25}
KINDS: dict[str, Callable[..., Any]] = {
    "adam": functools.partial(FusedAdam, betas=(0.0, 0.999)),
    "sgd": functools.partial(FusedSGD, **DAMPENED),
}
fused = KINDS["adam"]


@pytest.fixture(params=KINDS.values(), ids=KINDS, autouse=True)
def each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "fused", request.param)


@pytest.fixture
def params() -> list[torch.nn.Parameter]:
    return [parameter([1.0, 2.0], F16), parameter([[3.0]], F32), parameter([4.0] * 3, F16)]


def make(params: Any, **options: Any) -> Any:
    return UTILS(fused(params), **{"verbose": False, **DYNAMIC, **options})


def train(optimizer: Any, params: Any, *values: float) -> None:
    """Take one step for each value, which is every gradient."""
    for value in values:
        optimizer.zero_grad()
        optimizer.backward(pull(*((param, value) for param in params)))
        optimizer.step()


@scalings
def test_the_host_waits_for_nothing(scaling: Any, params: Any) -> None:
    optimizer = UTILS(
        fused([{"params": params[:1]}, {"params": params[1:]}], max_grad_norm=1.0),
        clip="global",
        verbose=False,
        **scaling,
    )
    train(optimizer, params, 1.0)
    with Waits() as waits:
        train(optimizer, params, 1.0, INF, 2.0, NAN, 3.0)
        for _ in range(2):  # Gradients of two losses add up.
            optimizer.backward(pull((params[0], 1.0)), update_master_grads=False)
        optimizer.step()
    assert waits.count == 0
    assert len(readback._pending) == 7
    assert optimizer.overflow is False
    assert len(readback._pending) == 0


def test_messages_come_late_but_in_order(params: Any, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = make(params, verbose=True, dynamic_loss_args={"init_scale": 1024.0})
    capsys.readouterr()
    train(optimizer, params, 1.0, INF, 1.0, NAN)
    assert capsys.readouterr().out == ""
    assert optimizer.loss_scale == 256.0
    assert capsys.readouterr().out.splitlines() == [
        "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, reducing to 512.0",
        # Gradients of this one are gone: there are no numbers.
        "  group 0, parameter 0 [2]: inf or NaN",
        "  group 0, parameter 1 [1, 1]: inf or NaN",
        "  group 0, parameter 2 [3]: inf or NaN",
        "OVERFLOW! Skipping step. Attempted loss scale: 512.0, reducing to 256.0",
        "  group 0, parameter 2 [3]: 0 inf, 3 NaN",
        "  group 0, parameter 0 [2]: 0 inf, 2 NaN",
        "  group 0, parameter 1 [1, 1]: 0 inf, 1 NaN",
    ]


@pytest.mark.parametrize("arrives", ["later", "at once"])
def test_an_overflow_is_reported_by_the_next_backward_if_it_has_arrived(
    arrives: str, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback.Readback, "has_arrived", lambda self: arrives == "at once")
    optimizer = make(params)
    train(optimizer, params, INF, 1.0)
    assert len(optimizer._record.report) == (3 if arrives == "at once" else 0)


# The same numbers as where the host waits.


def program(seed: int, face: Any) -> tuple[Any, list[Any]]:
    """A random training run with looks at everything; what it ends with."""
    rng = random.Random(seed)
    params = [parameter([1.0, 2.0], F16), parameter([[3.0]], rng.choice([F32, F16]))]
    scaling = rng.choice([{"static_loss_scale": 64.0}, DYNAMIC])
    inner = fused(params, max_grad_norm=rng.choice([0.0, 1.0]))
    optimizer = face(inner, verbose=False, **scaling)
    seen: list[Any] = []
    for _ in range(15):
        if rng.random() < 0.8:
            optimizer.zero_grad(set_to_none=rng.random() < 0.5)
        for _ in range(rng.choice([1, 1, 2])):
            some = rng.sample(params, rng.choice([1, 2, 2]))
            value = rng.choice([1.0, -0.5, 3e3, INF, NAN] + [0.25] * 8)
            later = rng.random() < 0.3
            optimizer.backward(
                pull(*((param, value) for param in some)), update_master_grads=not later
            )
        if rng.random() < 0.1:
            optimizer.loss_scale = rng.choice([32.0, 256.0])
        if rng.random() < 0.1:
            seen.append(optimizer.clip_master_grads(0.5))
        optimizer.step()
        if rng.random() < 0.2:
            seen.append((optimizer.overflow, optimizer.loss_scale, optimizer.cur_iter))
        if rng.random() < 0.1:
            optimizer.load_state_dict(optimizer.state_dict())
    report = sorted((one.name, one.shape) for one in optimizer.overflow_report)
    return everything(optimizer, *params), [seen, optimizer.loss_scaler.state_dict(), report]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_random_programs_end_as_where_the_host_waits(
    face: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwaited, unwaited_seen = program(seed, face)
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", set())
    waited, seen = program(seed, face)
    assert str(unwaited_seen) == str(seen)
    torch.testing.assert_close(unwaited, waited, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_scaler_that_wants_to_hear_of_each_step_does(params: Any) -> None:
    class Scaler(DynamicLossScaler):
        heard = 0

        def update_scale(self, overflow: bool) -> None:
            super().update_scale(overflow)
            self.heard += 1

    optimizer = make(params)
    optimizer.loss_scaler = Scaler(64.0)
    train(optimizer, params, 1.0, INF)
    assert optimizer._loss_scaler.heard == 2
    assert optimizer._loss_scaler.cur_scale == 32.0


# What goes on between a step and its news.


def test_a_hook_for_some_steps_leaves_host_and_device_agreeing(params: Any) -> None:
    optimizer = make(params)
    train(optimizer, params, 1.0, INF)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    train(optimizer, params, INF, 1.0, INF)
    hook.remove()
    optimizer.zero_grad()
    optimizer.backward(pull((params[0], 1.0)))
    assert params[0].grad is not None
    assert params[0].grad[0] == optimizer.loss_scale == 256.0  # One overflow is tolerated.


def test_news_that_come_at_once_are_not_lost(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send = readback.submit_tensor

    def submit_and_report(*arguments: Any) -> None:
        send(*arguments)
        readback.wait()  # as another thread may

    monkeypatch.setattr(readback, "submit_tensor", submit_and_report)
    optimizer = make(params)
    train(optimizer, params, INF)
    optimizer.zero_grad()
    assert optimizer.overflow is True


def test_what_has_arrived_is_reported_by_steps_too(
    params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback.Readback, "has_arrived", lambda self: True)
    optimizer = make(params, dynamic_loss_scale=False, static_loss_scale=2.0)
    scale = optimizer.loss_scale
    for _ in range(10):
        optimizer.zero_grad()
        (pull((params[0], 1.0)) * scale).backward()
        optimizer.step()
        assert len(readback._pending) == 1


# In a CUDA graph.


@contextmanager
def capture() -> Iterator[None]:
    SHIM.cuda_on_cpu_capture(True)
    try:
        yield
    finally:
        SHIM.cuda_on_cpu_capture(False)


@scalings
def test_replays_of_a_step_keep_scale_and_counts(scaling: Any) -> None:
    """Backward runs on torch's own operators, which the shim does not capture."""
    captured, plain = (
        UTILS(fused([parameter([1.0, 2.0], F16)]), verbose=False, **scaling) for _ in range(2)
    )
    weights = [optimizer.fp16_groups[0][0] for optimizer in (captured, plain)]
    for optimizer, weight in zip((captured, plain), weights, strict=True):
        train(optimizer, [weight], 1.0)
    with capture():
        captured.step()
    assert captured.cur_iter == 1
    for value in (1.0, INF, NAN, 2.0, 3.0, 4.0, INF, 0.5):
        for optimizer, weight in zip((captured, plain), weights, strict=True):
            optimizer.zero_grad(set_to_none=False)
            optimizer.backward(pull((weight, value)))
        SHIM.cuda_on_cpu_replay()
        plain.step()
        assert captured._overflow is None
        captured._grads.end_step()  # The host does not know that the graph has run.
        assert captured.overflow == plain.overflow
        assert captured.loss_scale == plain.loss_scale
        scaler, plain_scaler = captured.loss_scaler, plain.loss_scaler
        if isinstance(scaler, DynamicLossScaler):
            values = scaler.loss_scale_value, plain_scaler.loss_scale_value
            assert values[0] == values[1]
        assert torch.equal(*weights)


def test_options_are_refreshed_between_replays() -> None:
    captured, plain = (make([parameter([1.0, 2.0], F16)]) for _ in range(2))
    weights = [optimizer.fp16_groups[0][0] for optimizer in (captured, plain)]
    for optimizer, weight in zip((captured, plain), weights, strict=True):
        train(optimizer, [weight], 1.0)
    with capture():
        captured.step()
    for optimizer, weight in zip((captured, plain), weights, strict=True):
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.zero_grad(set_to_none=False)
        optimizer.backward(pull((weight, 1.0)))
    captured.refresh_hyperparameters()
    SHIM.cuda_on_cpu_replay()
    plain.step()
    assert torch.equal(*weights)


def test_a_scale_that_was_set_cannot_be_captured(params: Any) -> None:
    optimizer = make(params)
    train(optimizer, params, 1.0)
    optimizer.loss_scale = 64.0
    with capture(), pytest.raises(RuntimeError, match="the loss scale was set, or never used"):
        optimizer.step()
    train(optimizer, params, 1.0)
    with capture():
        optimizer.step()
