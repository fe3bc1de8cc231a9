"""FusedAdagrad is torch.optim.Adagrad, and reads its state and apex's; see test_fused_rules.py."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    Unchanged,
    copies_of,
    give_grads,
    make_params,
    train,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_near
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdagrad

OPTIONS: dict[str, Any] = {"lr": 0.03, "eps": 1e-8, "weight_decay": 0.1}


def assert_same_trajectory(optimizer: Any, params: Any, expected: Any, theirs: Any) -> None:
    bounds = TRAJECTORY_TOLERANCES[params[0].dtype]
    for param, wanted in zip(params, theirs, strict=True):
        assert_near(param.detach(), wanted.detach(), bounds)
        total = optimizer.state[param]["sum"] if param in optimizer.state else torch.zeros(())
        assert_near(total.expand_as(wanted), expected.state[wanted]["sum"], bounds)


# --- The same as torch.


# --- What apex has beside it.


def test_the_arguments_have_the_order_and_the_defaults_of_apex() -> None:
    parameters = inspect.signature(FusedAdagrad).parameters.values()
    by_position = {one.name: one.default for one in parameters if one.kind != one.KEYWORD_ONLY}
    assert list(by_position.items())[1:] == [
        ("lr", 1e-2),
        ("eps", 1e-10),
        ("weight_decay", 0.0),
        ("set_grad_none", True),
        ("adagrad_w_mode", False),
    ]


def test_the_state_of_torch_is_gone_on_with(device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    expected = torch.optim.Adagrad(theirs, **OPTIONS, initial_accumulator_value=0.5)
    how = {"missing": lambda step, index: index == 1 and step < 4}
    train(expected, theirs, range(3), **how)
    for param, other in zip(params, theirs, strict=True):
        param.data.copy_(other.detach())
    optimizer = FusedAdagrad(params, lr=1.0)
    optimizer.load_state_dict(expected.state_dict())
    assert {*optimizer.state[params[0]]} == {"sum"}
    for each, its in ((optimizer, params), (expected, theirs)):
        train(each, its, range(3, 6), **how)
    assert_same_trajectory(optimizer, params, expected, theirs)


def test_torch_needs_the_steps_that_are_not_counted_here(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdagrad(params, **OPTIONS)
    train(optimizer, params, range(3))
    theirs = copies_of(params)
    expected = torch.optim.Adagrad(theirs, **OPTIONS)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyError, match="step"):
        expected.load_state_dict(saved)
    expected = torch.optim.Adagrad(theirs, **OPTIONS)
    for state in saved["state"].values():
        state["step"] = torch.tensor(3.0)
    for group in saved["param_groups"]:
        group["lr_decay"] = 0.0
    expected.load_state_dict(saved)
    for each, its in ((optimizer, params), (expected, theirs)):
        train(each, its, range(3, 6))
    assert_same_trajectory(optimizer, params, expected, theirs)


@pytest.mark.parametrize(("name", "value"), [("lr_decay", 0.1), ("maximize", True)])
def test_what_only_torch_has_is_refused(name: str, value: Any) -> None:
    params = [Parameter(torch.ones(3))]
    saved = torch.optim.Adagrad(copies_of(params), **{name: value}).state_dict()
    optimizer = FusedAdagrad(params)
    sentence = rf"^FusedAdagrad\.load_state_dict: param_groups\[0\] has {name}={value}, which Fused"
    with Unchanged(optimizer), pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved)


def test_groups_may_decay_in_different_ways(device: torch.device) -> None:
    params = make_params(device)
    groups = [{"params": params[:3], "adagrad_w_mode": True}, {"params": params[3:]}]
    optimizer = FusedAdagrad(groups, **OPTIONS)
    others = copies_of(params)
    alone = [FusedAdagrad(others[:3], **OPTIONS, adagrad_w_mode=True)]
    alone += [FusedAdagrad(others[3:], **OPTIONS)]
    for step in range(3):
        give_grads(params, step)
        give_grads(others, step)
        for each in (optimizer, *alone):
            each.step()
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
