"""FusedSGD is torch.optim.SGD: all options, groups that change between steps, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_adam_cases import (
    F16,
    F32,
    F64,
    NAMES,
    copies_of,
    give_grads,
    make_params,
    state_of,
    train,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch.nn import Parameter

from apex_mp.optimizers import FusedSGD

MODES: list[dict[str, Any]] = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.0), (0.9, 0.3))
    for decay in (0.0, 0.1)
    for nesterov in (False, True)
    if not (nesterov and (momentum == 0.0 or dampening))
]
# All factors are powers of two: see test_operator_sgd.py.
MOMENTUM: dict[str, Any] = {"lr": 2.0**-4, "momentum": 0.5, "dampening": 0.75}


def mode_name(mode: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mode.items() if value) or "plain"


def assert_same_trajectory(
    optimizer: Any, params: list[Parameter], expected: Any, expected_params: list[Parameter]
) -> None:
    """Demand nearly equal parameters and momentum buffers."""
    bounds = TRAJECTORY_TOLERANCES[params[0].dtype]
    for param, wanted in zip(params, expected_params, strict=True):
        assert_near(param.detach(), wanted.detach(), bounds)
        state, wanted_state = state_of(optimizer, param), expected.state.get(wanted, {})
        assert state.keys() == wanted_state.keys()
        for key, value in state.items():
            assert_near(value, wanted_state[key], bounds)


# --- The same as torch.


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_the_trajectory_is_that_of_torch(
    dtype: torch.dtype, mode: dict[str, Any], device: torch.device
) -> None:
    params = make_params(device, dtype)
    theirs = copies_of(params)
    optimizer, expected = FusedSGD(params, 0.01, **mode), torch.optim.SGD(theirs, 0.01, **mode)
    # Some have no gradient in some steps, and the second none before the third.
    how = {"missing": lambda step, index: (step + index) % 5 == 0 or (index == 1 and step < 2)}
    for each, its in ((optimizer, params), (expected, theirs)):
        train(each, its, range(50), **how)
    assert_same_trajectory(optimizer, params, expected, theirs)


def test_every_bit_is_that_of_torch_where_products_are_exact(device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    options = MOMENTUM | {"weight_decay": 0.25}
    optimizer, expected = FusedSGD(params, **options), torch.optim.SGD(theirs, **options)
    for each, its in ((optimizer, params), (expected, theirs)):
        train(each, its, range(20))
    for param, wanted in zip(params, theirs, strict=True):
        assert torch.equal(param, wanted)
        states = optimizer.state[param], expected.state[wanted]
        assert torch.equal(*(state["momentum_buffer"] for state in states))


def test_weight_decay_after_momentum_decays_the_weights_alone(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, 0.5, momentum=0.5, weight_decay=0.25, wd_after_momentum=True)
    assert optimizer.wd_after_momentum is True
    expected = [p.detach().clone() for p in params]
    give_grads(params, 0)
    optimizer.step()
    for param, before in zip(params, expected, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad)
        assert_near(param.detach(), before - 0.5 * (param.grad + 0.25 * before))


# --- Options and groups that change.


def test_the_arguments_have_the_order_that_they_had() -> None:
    optimizer = FusedSGD([Parameter(torch.ones(1))], 0.1, 0.9, 0.0, 0.01, True, True, False, True)
    group = optimizer.param_groups[0]
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum")
    assert [group[name] for name in names] == [0.1, 0.9, 0.0, 0.01, True, True]
    assert (optimizer.materialize_master_grads, optimizer.set_grad_none) == (False, True)


# --- Clipping.


def test_clipping_divides_as_torch_does_where_norms_are_tiny(device: torch.device) -> None:
    weight = Parameter(torch.zeros(1, device=device))
    weight.grad = torch.full((1,), 1e-3, device=device)
    FusedSGD([weight], 1.0, max_grad_norm=1e-4).step()
    expected = torch.full((1,), -1e-3, device=device, requires_grad=True)
    expected.grad = torch.full((1,), 1e-3, device=device)
    torch.nn.utils.clip_grad_norm_([expected], 1e-4)
    torch.testing.assert_close(-weight.detach(), expected.grad, rtol=1e-6, atol=0.0)


# --- The legacy call.


def test_the_legacy_call_takes_lists_groups_or_a_generator(device: torch.device) -> None:
    results = []
    for kind in ("flat", "nested", "generator"):
        params = make_params(device)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = FusedSGD(groups, 0.125, momentum=0.5)
        copies = [torch.zeros_like(p, dtype=F16) for p in params]
        give_grads(params, 0)
        grads: list[Any] = [p.grad.half() * 8.0 for p in params]
        grads[1] = None
        for param in params:
            param.grad = None
        given: dict[str, Any] = {"grads": grads, "output_params": copies}
        if kind == "nested":
            given = {name: [each[:2], each[2:]] for name, each in given.items()}
        if kind == "generator":
            given = {name: (one for one in each) for name, each in given.items()}
        optimizer.step(scale=8.0, **given)
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            wanted = torch.zeros_like(copy) if index == 1 else param.detach().half()
            assert_same_bits(copy, wanted)
        results.append([p.detach().clone() for p in params])
    expected = make_params(device)
    give_grads(expected, 0, missing=lambda step, index: index == 1)
    torch.optim.SGD(expected, 0.125, momentum=0.5).step()
    for result in results:
        for param, wanted in zip(result, expected, strict=True):
            assert torch.equal(param, wanted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -0.1}, r"lr is -0\.1; it must be 0 or more"),
        ({"lr": float("nan")}, "lr is nan; it must be 0 or more"),
        ({"lr": torch.zeros(2)}, "lr is a tensor of 2 elements; it must have 1"),
        ({"lr": 0.1, "momentum": -1.0}, r"momentum is -1\.0; it must be 0 or more"),
        ({"lr": 0.1, "weight_decay": -1.0}, r"weight_decay is -1\.0; it must be 0 or more"),
        ({"lr": 0.1, "max_grad_norm": -1.0}, r"max_grad_norm is -1\.0; it must be 0 or more"),
        ({"lr": 0.1, "nesterov": True}, "nesterov is True, momentum 0.* needs momentum"),
        (
            {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1},
            r"nesterov is True, momentum 0\.9 and dampening 0\.1; it needs momentum and no",
        ),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^FusedSGD: {sentence}"):
        FusedSGD([Parameter(torch.ones(1))], **options)
    optimizer = FusedSGD([Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match=f"^FusedSGD: {sentence}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))], **options})
