"""MasterWeights around optimizers that are not torch's, and others around it."""

from __future__ import annotations

import abc
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from master_weights_cases import (
    BF16,
    check,
    give_grads,
    in_float32,
    masters_of,
    new_params,
    train_in_parallel,
)
from tolerances import assert_same_bits
from torch import Tensor, nn

from apex_mp.optimizers import MasterWeights
from apex_mp.parallel import LARC


def pair(optimizer_class: Any, device: Any, **options: Any) -> tuple[Any, ...]:
    params = new_params(None, BF16, device)
    twins = in_float32(params)
    ours = MasterWeights(params, optimizer_class, **options)
    return params, twins, ours, optimizer_class(twins, **options)


class Abstract(abc.ABC, torch.optim.SGD):
    """With a first base that keeps Python from changing the class of its objects."""


class Decaying(torch.optim.SGD):
    """Changes all parameters, those without a gradient too, and counts in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        for param in self.param_groups[0]["params"]:
            param.mul_(1 - 1e-3)


class ScheduleFree(torch.optim.SGD):
    """Has two sets of weights, as packages for training without a schedule."""

    @torch.no_grad()
    def eval(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.lerp_(self.state[param].setdefault("z", param.clone() + 1.0), 0.25)

    @torch.no_grad()
    def train(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.lerp_(self.state[param]["z"], 1 - 1 / 0.75)


@pytest.mark.parametrize("kind", [Abstract, Decaying, ScheduleFree])
def test_it_steps_as_with_float32_weights(kind: Any, device: torch.device) -> None:
    params, twins, ours, twin = pair(kind, device, lr=0.1)
    for step in range(4):
        give_grads(params, twins, step)
        if kind is Decaying:
            params[0].grad = twins[0].grad = None
        for optimizer in (ours, twin):
            optimizer.step()
            if kind is ScheduleFree:
                optimizer.eval()
                optimizer.train()
        check(ours, params, twins)
    ours.load_state_dict(ours.state_dict())
    assert ours.state["calls"] == 4 if kind is Decaying else isinstance(ours, kind)


def test_an_object_whose_first_base_is_abc_gets_masters_and_is_copied() -> None:
    params = [nn.Parameter(torch.ones(2, dtype=BF16))]
    given = Abstract(params, lr=2.0**-12)
    assert MasterWeights(given) is given
    params[0].grad = torch.ones_like(params[0])
    given.step()
    (param,), copied = copy.deepcopy((params, given))
    assert isinstance(copied, Abstract)
    assert_same_bits(copied.master(param), given.master(params[0]))
    assert type(type(given)(params, lr=0.1)) is Abstract


@pytest.mark.slow
@pytest.mark.cpu_only
def test_two_processes_average_their_gradients_in_each_step(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_in_parallel, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for grads, weight in results:
        assert all((grad == 1.5).all() for grad in grads)
        assert_same_bits(weight, results[0][1])


def test_larc_around_it_scales_its_gradients(device: torch.device) -> None:
    params, twins, ours, twin = pair(torch.optim.SGD, device, lr=0.1, weight_decay=0.01)
    around = LARC(ours), LARC(twin)
    for step in range(3):
        give_grads(params, twins, step)
        for optimizer in around:
            optimizer.step()
    kept: dict[Tensor, Tensor] = masters_of(ours)
    for param, expected in zip(params, twins, strict=True):
        # LARC measures the rounded weights and gradients.
        torch.testing.assert_close(kept[param], expected.detach(), rtol=0, atol=2.0**-9)
