"""Scales that live on the device: the host waits for nothing, and everything else is the same."""

from __future__ import annotations

import copy
import functools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32, INF, NAN, parameter, pull
from torch import nn
from waits import Waits

import apex_mp
from apex_mp import amp
from apex_mp.core import readback
from apex_mp.core.readback import Readback
from apex_mp.optimizers import FusedAdam
from apex_mp.scale import device_scale

pytestmark = pytest.mark.usefixtures("amp_off")

SCALE = 65536.0
# Whose step takes found_inf from the device.
OPTIMIZERS = {
    "FusedAdam": functools.partial(FusedAdam, lr=0.5),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.5, fused=True),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@pytest.fixture(autouse=True)
def on_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep scales on the device, whichever that is; nothing arrives before the host waits."""
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(Readback, "has_arrived", lambda self: False)
    yield
    readback._pending.clear()


@pytest.fixture
def handle(device: torch.device) -> Any:
    return amp.init(device_type=device.type)


@pytest.fixture
def weight(device: torch.device) -> nn.Parameter:
    return parameter([1.0, 2.0], F32, device)


def backward(handle: Any, loss: Any, optimizer: Any) -> None:
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


# What stays on the device.


@optimizers
def test_the_host_waits_for_nothing_in_a_training_loop(
    make: Any, handle: Any, device: torch.device, weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = parameter([3.0], F32, device)
    optimizer = make([weight, other])
    backward(handle, pull((weight, 1.0), (other, 1.0)), optimizer)
    optimizer.step()  # torch's own makes its state now.
    values = torch.tensor([1.0, INF, 1.0, NAN, 1.0], device=device)
    finished = []
    monkeypatch.setattr(Readback, "finish", lambda self: finished.append(self))
    with Waits() as waits:
        for value in values:
            optimizer.zero_grad()
            for loss in ((weight * value).sum(), (weight + other).sum()):
                backward(handle, loss, optimizer)
            optimizer.step()
    assert waits.count == 0
    assert finished == []
    assert len(readback._pending) == 17  # Of 11 blocks and 6 steps.


# The same numbers as on the host.


def run(seed: int, handle: Any, device: torch.device, make: Any, scaler: Any) -> list[Any]:
    """A random program of blocks and steps; what it ends with."""
    rng = random.Random(seed)
    params = [
        parameter([1.0, 2.0], F32, device),
        parameter([[3.0]], rng.choice([F32, F16]), device),
    ]
    optimizer = make(params)
    handle._default_scaler = scaler
    trace: list[Any] = []
    for _ in range(12):
        for _ in range(rng.choice([1, 1, 2, 3])):
            values = [rng.choice([1.0, -0.5, 3e4, 1e36, INF, NAN] + [0.25] * 12) for _ in params]
            some = [*zip(params, values, strict=True)][: rng.choice([1, 2, 2])]
            backward(handle, pull(*some), optimizer)
            if rng.random() < 0.1:
                trace.append(scaler.loss_scale())
            if rng.random() < 0.1:
                optimizer.zero_grad()
        result = optimizer.step(lambda: 7.0) if rng.random() < 0.15 else optimizer.step()
        trace.append(result)
        if rng.random() < 0.3:
            trace.append(amp.step_was_skipped(optimizer))
        if rng.random() < 0.1:
            scaler._loss_scale = 64.0
        if rng.random() < 0.9:
            optimizer.zero_grad(set_to_none=rng.random() < 0.5)
    trace += [amp.step_was_skipped(optimizer), scaler.value, params]
    return trace + [
        {key: optimizer.state[param][key] for key in sorted(optimizer.state[param])}
        for param in params
    ]


@pytest.mark.parametrize("block", range(4))
def test_random_programs_end_with_the_same_bits_as_on_the_host(
    block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle: Any = amp.init(device_type=device.type)
    for seed in range(block * 10, block * 10 + 10):
        scaler = amp.scaler.LossScaler("dynamic" if seed % 3 else 128.0, 1024.0, scale_window=2)
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
        ours = run(seed, handle, device, OPTIMIZERS["FusedAdam"], copy.deepcopy(scaler))
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", set())
        host = run(seed, handle, device, OPTIMIZERS["FusedAdam"], copy.deepcopy(scaler))
        assert str(ours) == str(host), seed


# What the host gets to know, and when.


@optimizers
def test_a_query_waits_for_the_result(make: Any, handle: Any, weight: Any) -> None:
    optimizer = make([weight])
    for value, scale in ((1.0, SCALE), (INF, SCALE / 2), (1.0, SCALE / 2)):
        optimizer.zero_grad()
        backward(handle, pull((weight, value)), optimizer)
        before = weight.detach().clone()
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is (value == INF)
        assert torch.equal(weight, before) is (value == INF)
        assert handle._default_scaler._loss_scale == scale
    assert handle.state_dict()["loss_scaler0"]["unskipped"] == 1
    assert not hasattr(optimizer, "found_inf")


def test_the_message_comes_later_and_names_what_is_still_there(
    handle: Any, weight: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = FusedAdam([weight])
    backward(handle, pull((weight, INF)), optimizer)
    optimizer.step()
    assert caplog.messages == []
    assert amp.step_was_skipped(optimizer) is True
    first = "Gradient overflow, skipping update; the loss scale goes from {} to {}"
    assert [caplog.messages[0]] == [
        first.format(65536.0, 32768.0) + "\n  group 0, parameter 0 [2]: 2 inf, 0 NaN"
    ]
    backward(handle, pull((weight, INF)), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(Readback, "has_arrived", lambda self: True)
    backward(handle, pull((weight, 1.0)), optimizer)  # The next block looks what has arrived.
    assert caplog.messages[1:] == [first.format(32768.0, 16384.0)]


def test_switching_off_reports_everything_and_still_skips(
    handle: Any, weight: Any, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = FusedAdam([weight])
    backward(handle, pull((weight, INF)), optimizer)
    handle._deactivate()
    assert len(caplog.messages) == 1
    optimizer.step()
    assert weight.tolist() == [1.0, 2.0]
    assert "step" not in vars(optimizer)


# The end of the process.

PROGRAM = """
import os
import torch
from apex_mp import amp
from apex_mp.core import readback
from apex_mp.scale import device_scale
from apex_mp.optimizers import FusedAdam

device_scale.DEVICE_TYPES = {"cpu"}
readback.Readback.has_arrived = lambda transfer: has_ended
has_ended = False

def main():
    handle = amp.init(device_type="cpu")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([weight])
    with handle.scale_loss((weight * float("inf")).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(len(readback._pending), "under way", flush=True)

main()
has_ended = True
if os.fork():
    os.wait()
"""


@pytest.mark.slow
@pytest.mark.cpu_only
def test_what_is_under_way_at_the_end_of_the_process_is_reported_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(apex_mp.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "2 under way",
        "Gradient overflow, skipping update; the loss scale goes from 65536.0 to 32768.0",
        "  group 0, parameter 0 [2]: 2 inf, 0 NaN",
    ]


# Together with the rest.


def test_a_closure_that_overflows_is_called_again(handle: Any, weight: Any) -> None:
    optimizer = FusedAdam([weight], lr=0.5)
    handle._default_scaler._loss_scale = 2.0**18
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        backward(handle, pull((weight, 2.0**112)), optimizer)
        calls.append(None)
        return 7.0

    for count in (4, 5):
        assert optimizer.step(closure) == 7.0
        assert len(calls) == count
    assert handle._default_scaler.loss_scale() == 2.0**15
    assert amp.step_was_skipped(optimizer) is False
