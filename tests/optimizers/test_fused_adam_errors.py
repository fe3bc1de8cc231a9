"""What FusedAdam refuses, in which words, and that a refusal changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    Unchanged,
    copies_of,
    make_params,
    train,
)
from tolerances import assert_near

from apex_mp.optimizers import FusedAdam

WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "amsgrad": (
        {"amsgrad": True},
        RuntimeError,
        r"^FusedAdam does not support the AMSGrad variant\.$",
    ),
    "lr": ({"lr": -0.1}, ValueError, "lr is -0.1; it must be 0 or more"),
    "lr NaN": ({"lr": math.nan}, ValueError, "lr is nan; it must be 0 or more"),
    "lr of two": (
        {"lr": torch.ones(2)},
        ValueError,
        "lr is a tensor of 2 elements; it must have 1",
    ),
    "eps": ({"eps": -1e-8}, ValueError, "eps is -1e-08; it must be 0 or more"),
    "weight_decay": ({"weight_decay": -1}, ValueError, "weight_decay is -1; it must be 0 or more"),
    "max_grad_norm": (
        {"max_grad_norm": -1.0},
        ValueError,
        "max_grad_norm is -1.0; it must be 0 or more",
    ),
    "beta1": (
        {"betas": (1.0, 0.9)},
        ValueError,
        r"betas is \(1.0, 0.9\); it must be two numbers in \[0, 1\)",
    ),
    "beta2": ({"betas": (0.9, -0.1)}, ValueError, r"betas is \(0.9, -0.1\)"),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, ValueError, "it must be two numbers"),
    "one beta": (
        {"betas": 0.9},
        TypeError,
        r"^FusedAdam: betas is 0.9; it must be two numbers in \[0, 1\)$",
    ),
    "betas as text": (
        {"betas": ("0.9", 0.999)},
        TypeError,
        r"^FusedAdam: one of betas is '0.9'; it must be a number",
    ),
    "lr as text": (
        {"lr": "1e-3"},
        TypeError,
        r"^FusedAdam: lr is '1e-3'; it must be a number \(YAML reads 1e-3 as text; write 1.0e-3\)$",
    ),
    "eps None": ({"eps": None}, TypeError, "^FusedAdam: eps is None; it must be a number$"),
}
each_wrong = pytest.mark.parametrize(
    ("options", "error", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS
)


@each_wrong
def test_a_wrong_hyperparameter_is_refused_by_the_constructor(
    options: dict[str, Any], error: type[Exception], message: str, device: torch.device
) -> None:
    with pytest.raises(error, match=message):
        FusedAdam(make_params(device), **options)


@each_wrong
def test_a_wrong_hyperparameter_of_a_group_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, device: torch.device
) -> None:
    params = make_params(device)
    with pytest.raises(error, match=message):
        FusedAdam([{"params": params[:1]}, {"params": params[1:], **options}])
    optimizer = FusedAdam(params[:1])
    with Unchanged(optimizer), pytest.raises(error, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": "1e-3"}, "^FusedAdam: lr is '1e-3'; it must be a number$"),
        ({"eps": None}, "^FusedAdam: eps is None; it must be a number$"),
        ({"betas": 0.9}, r"^FusedAdam: betas is 0.9; it must be two numbers in \[0, 1\)$"),
        ({"betas": (0.9, "0.999")}, "^FusedAdam: one of betas is '0.999'; it must be a number$"),
    ],
)
def test_an_option_that_becomes_no_number_is_refused_by_the_step(
    option: dict[str, Any], message: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    train(optimizer, params, range(1))
    optimizer.param_groups[0].update(option)
    before = copies_of(params)
    with pytest.raises(TypeError, match=message):
        optimizer.step()
    for param, wanted in zip(params, before, strict=True):
        assert torch.equal(param, wanted)


@pytest.mark.parametrize("lr", [-0.1, math.nan])
def test_a_schedule_past_its_end_steps_as_in_torch(lr: float, device: torch.device) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer, expected = FusedAdam(params), torch.optim.AdamW(expected_params, weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = lr
    train(optimizer, params, range(1))
    train(expected, expected_params, range(1))
    for param, wanted in zip(params, expected_params, strict=True):
        assert_near(param.detach(), wanted.detach())


def test_the_old_positions_and_defaults_of_the_arguments_hold(device: torch.device) -> None:
    params = make_params(device)
    positional = FusedAdam(params, 0.1, False, (0.8, 0.9), 1e-3, True, 0.2, 0.5, False)
    group = positional.param_groups[0]
    assert (group["lr"], group["bias_correction"], group["betas"]) == (0.1, False, (0.8, 0.9))
    assert (group["eps"], group["weight_decay"], group["max_grad_norm"]) == (1e-3, 0.2, 0.5)
    assert positional.eps_mode == 0
    default = FusedAdam(params)
    group = default.param_groups[0]
    assert (group["lr"], group["bias_correction"], group["betas"]) == (1e-3, True, (0.9, 0.999))
    assert (group["eps"], group["weight_decay"], group["max_grad_norm"]) == (1e-8, 0.0, 0.0)
    assert (group["adam_w_mode"], group["amsgrad"]) == (True, False)
    assert default.eps_mode == 1


def test_a_misspelt_keyword_is_refused(device: torch.device) -> None:
    with pytest.raises(TypeError, match="weigth_decay"):
        FusedAdam(make_params(device), weigth_decay=0.1)
