"""FusedNovoGrad is apex's, in formula and checkpoints; for all else see test_fused_rules.py."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    F16,
    F32,
    Unchanged,
    assert_same_state,
    copies_of,
    make_params,
    train,
)
from torch.nn import Parameter

from apex_mp.optimizers import FusedNovoGrad

OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.1}


def weight_and_grad(device: torch.device) -> Parameter:
    """A parameter (2, 2) with the gradient (3, -4), whose norms are 5 and 4."""
    weight = Parameter(torch.full((2,), 2.0, device=device))
    weight.grad = torch.tensor([3.0, -4.0], device=device)
    return weight


# --- The formula by hand.


@pytest.mark.parametrize(
    ("norm_type", "init_zero", "norms"),
    [
        (2, False, [5.0, math.sqrt(0.5 * 25.0 + 0.5 * 100.0)]),
        (2, True, [math.sqrt(0.5 * 25.0), math.sqrt(0.5 * 12.5 + 0.5 * 100.0)]),
        (0, False, [4.0, 0.5 * 4.0 + 0.5 * 8.0]),
        (0, True, [2.0, 0.5 * 2.0 + 0.5 * 8.0]),
    ],
)
def test_norms_are_averaged_from_the_first_gradient_or_from_zero(
    norm_type: int, init_zero: bool, norms: list[float], device: torch.device
) -> None:
    weight = weight_and_grad(device)
    options = {"betas": (0.9, 0.5), "norm_type": norm_type, "init_zero": init_zero}
    optimizer = FusedNovoGrad([weight], **options)
    for factor, norm in zip((1.0, 2.0), norms, strict=True):
        weight.grad = torch.tensor([3.0, -4.0], device=device) * factor
        optimizer.step()
        assert optimizer.state[weight]["exp_avg_sq"].item() == pytest.approx(norm, rel=1e-6)


# --- The signature.


def test_the_arguments_have_the_order_and_the_defaults_of_apex() -> None:
    parameters = inspect.signature(FusedNovoGrad).parameters.values()
    by_position = {one.name: one.default for one in parameters if one.kind != one.KEYWORD_ONLY}
    assert list(by_position.items())[1:] == [
        ("lr", 1e-3),
        ("bias_correction", True),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 0.0),
        ("amsgrad", False),
        ("reg_inside_moment", False),
        ("grad_averaging", True),
        ("norm_type", 2),
        ("init_zero", False),
        ("set_grad_none", True),
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"amsgrad": True}, r"^FusedNovoGrad does not support the AMSGrad variant\.$"),
        ({"norm_type": 1}, r"^FusedNovoGrad only support l2/inf norm now\.$"),
    ],
    ids=["amsgrad", "norm_type"],
)
def test_what_apex_refused_is_refused_in_its_words(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        FusedNovoGrad([Parameter(torch.ones(1))], **options)
    optimizer = FusedNovoGrad([Parameter(torch.ones(1))])
    with pytest.raises(RuntimeError, match=sentence):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))], **options})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(options)
    with Unchanged(optimizer), pytest.raises(RuntimeError, match=sentence):
        optimizer.load_state_dict(saved)


# --- Checkpoints.


def in_apex_layout(optimizer: FusedNovoGrad) -> dict[str, Any]:
    """Return a state_dict as apex's optimizer saved it: norms and the step count in the group."""
    saved = copy.deepcopy(optimizer.state_dict())
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        norms: dict[torch.dtype, list[float]] = {F16: [], F32: []}
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            if index in saved["state"]:
                state = saved["state"][index]
                norms[param.dtype].append(state["exp_avg_sq"].item())
                saved_group["step"] = int(state["step"])
                saved["state"][index] = {"exp_avg": state["exp_avg"]}
        saved_group["exp_avg_sq"] = [torch.tensor(norms[F16]), torch.tensor(norms[F32])]
        for name in ("reg_inside_moment", "amsgrad", "max_grad_norm"):
            del saved_group[name]
    return saved


def mixed_params(device: torch.device) -> list[Parameter]:
    """Return parameters of float16 and float32 in turns."""
    pairs = zip(make_params(device, F16), make_params(device, F32), strict=True)
    return [pair[index % 2] for index, pair in enumerate(pairs)]


def test_a_state_dict_of_apex_goes_on_where_it_was_saved(device: torch.device) -> None:
    params = mixed_params(device)
    groups = [{"params": params[:4], "reg_inside_moment": True}, {"params": params[4:]}]
    optimizer = FusedNovoGrad(groups, **OPTIONS)
    # apex has norms of the parameters that had a gradient.
    train(optimizer, params, range(3), missing=lambda step, index: index == 2)
    others = copies_of(params)
    groups = [{"params": others[:4], "reg_inside_moment": True}, {"params": others[4:]}]
    other = FusedNovoGrad(groups, lr=1.0)
    saved = in_apex_layout(optimizer)
    assert [len(each) for each in saved["param_groups"][0]["exp_avg_sq"]] == [1, 2]
    other.load_state_dict(saved)
    assert not {"step", "exp_avg_sq"} & {*other.param_groups[0]}
    assert_same_state(optimizer, other)
    for each, its in ((optimizer, params), (other, others)):
        train(each, its, range(3, 6))
    assert_same_state(optimizer, other)


@pytest.mark.parametrize("count", [1, 4])
def test_norms_of_apex_that_do_not_fit_are_refused(count: int, device: torch.device) -> None:
    params = mixed_params(device)
    optimizer = FusedNovoGrad(params, **OPTIONS)
    train(optimizer, params, range(1))
    saved = in_apex_layout(optimizer)
    saved["param_groups"][0]["exp_avg_sq"][1] = torch.ones(count)
    sentence = (
        rf"^FusedNovoGrad\.load_state_dict: param_groups\[0\] has {count} norms of parameters of "
        r"torch\.float32, and states of 3; they must match$"
    )
    with Unchanged(optimizer), pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved)
