"""A Ctrl-C anywhere in the package: the next iterations train, as if nothing had happened."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import run_until
from torch import nn

from apex_mp import amp
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam

_DRAWN = 12


def scaled(make: Any, half: bool, clip: bool) -> Any:
    def new(device: torch.device) -> tuple[Callable[[], None], nn.Module, Any]:
        model = nn.Linear(4, 4).to(device, torch.float16 if half else torch.float32)
        optimizer = make(model.parameters())
        scaler = amp.GradScaler(device.type, init_scale=8.0)
        data = torch.ones(2, 4, device=device).to(model.weight)

        def iteration() -> None:
            optimizer.zero_grad()
            scaler.scale(model(data).float().pow(2).mean()).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return iteration, model, scaler

    return new


def by_scale_loss(level: str) -> Any:
    def new(device: torch.device) -> tuple[Callable[[], None], nn.Module, Any]:
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        data = torch.ones(2, 4, device=device)

        def iteration() -> None:
            optimizer.zero_grad()
            with amp.scale_loss(model(data).float().pow(2).mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()

        return iteration, model, None

    return new


def by_fp16_optimizer(device: torch.device) -> tuple[Callable[[], None], nn.Module, Any]:
    model = nn.Linear(4, 4).to(device, torch.float16)
    inner = FusedAdam(model.parameters(), 1e-3)
    scale = {"init_scale": 8.0}
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=scale)
    data = torch.ones(2, 4, device=device).half()

    def iteration() -> None:
        optimizer.zero_grad()
        optimizer.backward(model(data).float().pow(2).mean())
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    return iteration, model, None


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 1e-3)


def fused(params: Any) -> torch.optim.Optimizer:
    return FusedAdam(params, 1e-3, master_weights=True)


LOOPS: dict[str, Any] = {
    "half, clipped": scaled(fused, half=True, clip=True),
    "float32": scaled(fused, half=False, clip=False),
    "not fused, clipped": scaled(sgd, half=False, clip=True),
    "scale_loss O1": by_scale_loss("O1"),
    "scale_loss O2": by_scale_loss("O2"),
    "FP16_Optimizer": by_fp16_optimizer,
}


def places_of(name: str, device: torch.device) -> list[str]:
    iteration, _, _ = LOOPS[name](device)
    iteration()
    return run_until(None, iteration)


def check(name: str, at: int, device: torch.device) -> None:
    """Interrupt an iteration; the next ones must train."""
    iteration, model, scaler = LOOPS[name](device)
    iteration()
    place = run_until(at, iteration)[-1]
    model.zero_grad()
    if scaler is not None:
        with contextlib.suppress(AssertionError):  # Perhaps nothing was measured yet.
            scaler.update()
    before = [param.detach().clone() for param in model.parameters()]
    try:
        for _ in range(3):
            iteration()
    except Exception as error:
        raise AssertionError(f"after a Ctrl-C at {place}") from error
    after = [param.detach() for param in model.parameters()]
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True)), place
    assert all(param.isfinite().all() for param in after), place


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", LOOPS)
def test_training_goes_on_after_a_ctrl_c(name: str, device: torch.device) -> None:
    for at in random.Random(name).sample(range(len(places_of(name, device))), _DRAWN):
        check(name, at, device)


# --- Where it was found: in a window of microseconds.

FOUND = {
    "half, clipped": ("Iteration.clip_in_step line", "Iteration.clip_in_step return"),
    "scale_loss O2": (
        "OptimizerMasters.end_block call",
        "_open_blocks line",
        "_open_blocks return",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_where_a_ctrl_c_once_ended_all_training(name: str, device: torch.device) -> None:
    places = places_of(name, device)
    for found in FOUND[name]:
        reached = [at for at, place in enumerate(places) if place.endswith(found)]
        assert reached, found
        for at in reached:
            check(name, at, device)
