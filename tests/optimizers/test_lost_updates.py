"""A fused optimizer that steps 16-bit parameters without masters warns once, scaler or not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fused_adam_cases import BF16, F16, F32
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.amp import GradScaler
from apex_mp.core import readback
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

OPTIMIZERS: list[Any] = [FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD]


def said_by(optimizer: Any, steps: int, grad: float = 1.0, scaler: Any = None) -> list[str]:
    """Return the warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.full_like(param, grad)
            if scaler is None:
                optimizer.step()
            else:
                scaler.scale(torch.zeros((), device=param.device))
                scaler.step(optimizer)
                scaler.update()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_first_step_warns_once(kind: Any, dtype: torch.dtype, device: torch.device) -> None:
    param = Parameter(torch.ones(1000, dtype=dtype, device=device))
    wide = Parameter(torch.ones(3, device=device))
    optimizer = kind([("w", param), ("b", wide)], lr=1e-6)
    name, short = kind.__name__, str(dtype).removeprefix("torch.")
    assert said_by(optimizer, 3) == [
        f"{name} steps 1 parameter of {short} that have no float32 masters: w. An update of less "
        f"than half the distance between two such numbers is lost. {name}(..., "
        "master_weights=True) keeps masters "
        "[python -m apex_mp explain updates-are-lost]"
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_with_masters_or_in_float32_nothing_is_lost(kind: Any, device: torch.device) -> None:
    for dtype, masters in ((F16, True), (BF16, "split"), (F32, False)):
        param = Parameter(torch.ones(1000, dtype=dtype, device=device))
        assert said_by(kind([param], lr=1e-6, master_weights=masters), 3) == []


def test_our_scaler_warns_in_its_place(device: torch.device) -> None:
    param = Parameter(torch.ones(1000, dtype=F16, device=device))
    optimizer, scaler = FusedAdam([param], lr=1e-6), GradScaler(device.type, init_scale=1.0)
    (one,) = said_by(optimizer, 3, 1.0, scaler)
    assert one.startswith("GradScaler: FusedAdam steps 1 parameter of float16")


@pytest.mark.usefixtures("amp_off")
def test_o3_means_it(device: torch.device) -> None:
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert said_by(optimizer, 3) == []


def test_a_plain_step_handles_what_came_from_a_device_meanwhile(device: torch.device) -> None:
    """A loop without a scaler has nothing else that does; pinned memory would pile up."""
    param = Parameter(torch.ones(2, device=device))
    optimizer = FusedSGD([param], lr=0.1)
    arrived: list[list[float]] = []
    readback.submit([torch.ones((), device=device)], arrived.append)
    if device.type == "cuda":
        torch.cuda.synchronize()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert arrived == [[1.0]]
