"""FusedLAMB is apex's, in formula and checkpoints; for all else see test_fused_rules.py."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import reference
import torch
from fused_adam_cases import (
    assert_same_state,
    copies_of,
    make_params,
    train,
)
from rule_cases import assert_stepped, references_after_step
from scaled_steps import take_step
from torch.nn import Parameter

from apex_mp.optimizers import FusedLAMB

OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.1}


def weight_and_grad(device: torch.device, weight: Any = (3.0, 4.0)) -> Parameter:
    """A parameter, of norm 5 if nothing else is asked for, with a gradient."""
    param = Parameter(torch.tensor(weight, device=device))
    param.grad = torch.tensor([2.0, -1.0], device=device).repeat(len(weight) // 2)
    return param


# --- The formula by hand.


def test_nvlamb_takes_the_ratio_without_decay_too(device: torch.device) -> None:
    param = weight_and_grad(device)
    FusedLAMB([param], 0.5, weight_decay=0.0, use_nvlamb=True, eps=0.0).step()
    step = 0.5 * 5.0 / math.sqrt(2.0)
    assert param.tolist() == pytest.approx([3.0 - step, 4.0 + step], rel=1e-5)


def test_each_tensor_has_its_own_ratio(device: torch.device) -> None:
    """Each of many sizes, of one chunk and of several, moves by lr times its norm."""
    sizes = (1, 63, 20_000, 5)
    params = [Parameter(torch.linspace(0.5, 1.0 + n % 7, n, device=device)) for n in sizes]
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 10.0 ** (index - 2))
    before = [param.detach().clone() for param in params]
    FusedLAMB(params, 0.25, weight_decay=0.0, use_nvlamb=True, eps=0.0).step()
    for param, old in zip(params, before, strict=True):
        moved = torch.linalg.vector_norm((param.detach() - old).double())
        wanted = 0.25 * torch.linalg.vector_norm(old.double())
        assert moved.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("pairs", [1, 2501])  # On CUDA a thread then takes two vectors, or one.
def test_parameters_whose_squares_are_beyond_float32_have_a_norm(
    pairs: int, device: torch.device
) -> None:
    param = weight_and_grad(device, (3e30, 4e30) * pairs)
    FusedLAMB([param], 0.5, weight_decay=0.0, use_nvlamb=True, eps=0.0).step()
    step = 0.5 * 5e30 / math.sqrt(2.0)
    assert param.tolist() == pytest.approx([3e30 - step, 4e30 + step] * pairs, rel=1e-5)


# --- The signature.


def test_the_arguments_have_the_order_and_the_defaults_of_apex() -> None:
    parameters = inspect.signature(FusedLAMB).parameters.values()
    by_position = {one.name: one.default for one in parameters if one.kind != one.KEYWORD_ONLY}
    assert list(by_position.items())[1:] == [
        ("lr", 1e-3),
        ("bias_correction", True),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-6),
        ("weight_decay", 0.01),
        ("amsgrad", False),
        ("adam_w_mode", True),
        ("grad_averaging", True),
        ("set_grad_none", True),
        ("max_grad_norm", 1.0),
        ("use_nvlamb", False),
    ]


def in_apex_layout(optimizer: FusedLAMB) -> dict[str, Any]:
    """Return a state_dict as apex's optimizer saved it: the step count in the group."""
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for index in group["params"]:
            if index in saved["state"]:
                group["step"] = int(saved["state"][index].pop("step"))
        del group["amsgrad"], group["adam_w_mode"], group["use_nvlamb"]
    return saved


def test_a_state_dict_of_apex_goes_on_where_it_was_saved(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedLAMB(params, **OPTIONS)
    train(optimizer, params, range(3), missing=lambda step, index: index == 2)
    others = copies_of(params)
    other = FusedLAMB(others, lr=1.0)
    other.load_state_dict(in_apex_layout(optimizer))
    assert "step" not in other.param_groups[0]
    assert_same_state(optimizer, other)
    for each, its in ((optimizer, params), (other, others)):
        train(each, its, range(3, 6))
    assert_same_state(optimizer, other)


@pytest.mark.parametrize("way", ["", "norms are given", "with a check"])
def test_all_groups_are_clipped_by_the_norm_of_all(way: str, device: torch.device) -> None:
    params = [weight_and_grad(device), weight_and_grad(device)]
    groups = [{"params": params[:1]}, {"params": params[1:], "max_grad_norm": 0.25}]
    optimizer = FusedLAMB(groups, **OPTIONS, max_grad_norm=0.5)
    grads = [param.grad for param in params]
    expected = references_after_step(optimizer, reference.LAMB, grads)
    if way == "with a check":
        result = take_step(optimizer, check=True)
        assert result.outcome.norms == pytest.approx([math.sqrt(5.0)] * 2)
    elif way:
        optimizer.step(grads=grads, grad_norms=[math.sqrt(5.0)] * 2)
    else:
        optimizer.step()
    assert_stepped(optimizer, expected)
    # As if both were one gradient, of norm sqrt(10).
    clipped = 2.0 * 0.5 / math.sqrt(10.0)
    assert optimizer.state[params[0]]["exp_avg"][0].item() == pytest.approx(0.2 * clipped, rel=1e-5)
