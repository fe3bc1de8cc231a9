"""What tests of all ways to train share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from offload_cases import stand_in
from several_devices_cases import side_of, step_unwaited

from apex_mp.core import readback
from apex_mp.core.readback import Readback
from apex_mp.engine import devices as engine_devices
from apex_mp.scale import device_scale


@pytest.fixture(params=["waits", "does not wait"])
def host(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Whether the host knows the outcome of a step, or nothing arrives before it waits for it."""
    if request.param == "does not wait":
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {device.type})
        monkeypatch.setattr(Readback, "has_arrived", lambda self: False)
        if device.type == "cpu":
            step_unwaited(monkeypatch)
    yield request.param
    readback._pending.clear()


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of devices; of two, the second has the parameters of odd size."""
    if request.param == 2:
        monkeypatch.setattr(engine_devices, "device_of", side_of)
    return request.param


@pytest.fixture
def other_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a stand-in for the GPU, beside which there is host memory."""
    if device.type == "cpu":
        stand_in(monkeypatch)
