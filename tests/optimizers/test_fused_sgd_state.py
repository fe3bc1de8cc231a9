"""State and checkpoints of FusedSGD: those of torch.optim.SGD, pickles, copies, moved models."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    Unchanged,
    assert_same_state,
    copies_of,
    make_params,
    train,
)
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp.optimizers import FusedSGD

# Powers of two, where torch's SGD gives the same bits: see test_operator_sgd.py.
OPTIONS: dict[str, Any] = {"lr": 2.0**-4, "momentum": 0.5, "dampening": 0.75, "weight_decay": 0.25}


def buffers_of(optimizer: Any, params: list[Parameter]) -> list[Any]:
    return [optimizer.state.get(param, {}).get("momentum_buffer") for param in params]


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("direction", ["from torch", "to torch", "to itself"])
def test_a_state_dict_goes_on_where_it_was_saved(direction: str, device: torch.device) -> None:
    save, load = {
        "from torch": (torch.optim.SGD, FusedSGD),
        "to torch": (FusedSGD, torch.optim.SGD),
        "to itself": (FusedSGD, FusedSGD),
    }[direction]
    params = make_params(device)
    first = save(params, **OPTIONS)
    # The last has had no gradient yet: its first one is not dampened.
    how = {"missing": lambda step, index: index == 5 and step < 6}
    train(first, params, range(4), **how)
    others = copies_of(params)
    second = load(others, lr=1.0)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    for each, its in ((first, params), (second, others)):
        train(each, its, range(4, 9), **how)
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
    for ours, theirs in zip(buffers_of(first, params), buffers_of(second, others), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [F16, BF16, F64], ids=NAMES.get)
def test_loaded_buffers_keep_the_dtype_of_the_math(
    dtype: torch.dtype, device: torch.device
) -> None:
    params = make_params(device, dtype)
    optimizer = FusedSGD(params, **OPTIONS)
    train(optimizer, params, range(3))
    others = copies_of(params)
    other = FusedSGD(others, lr=1.0)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for ours, theirs in zip(buffers_of(optimizer, params), buffers_of(other, others), strict=True):
        assert theirs.dtype == (F64 if dtype == F64 else F32)
        assert_same_bits(theirs, ours)
        assert theirs.data_ptr() != ours.data_ptr() or not ours.numel()


@pytest.mark.parametrize(
    ("spoil", "error", "sentence"),
    [
        (
            lambda saved: saved["state"][2].update(momentum_buffer=torch.ones(3)),
            ValueError,
            r"state\[2\]\['momentum_buffer'\] has shape \[3\], its parameter \[\]; they must match",
        ),
        (
            lambda saved: saved["state"][2].update(momentum_buffer=torch.ones((), dtype=torch.int)),
            TypeError,
            r"state\[2\]\['momentum_buffer'\] is of type torch\.int32; it must be a floating",
        ),
        (
            lambda saved: saved["state"][2].update(momentum_buffer=3.0),
            TypeError,
            r"state\[2\]\['momentum_buffer'\] is of type float; it must be a floating tensor",
        ),
        (
            lambda saved: saved["state"].update({1: {"exp_avg": torch.ones(4, 3)}}),
            ValueError,
            r"state\[1\] has \['exp_avg'\] and lacks \['momentum_buffer'\]; it must be the state",
        ),
        (
            lambda saved: saved["param_groups"][0].update(maximize=True),
            ValueError,
            r"param_groups\[0\] has maximize=True, which FusedSGD does not have",
        ),
        (
            lambda saved: saved["param_groups"][0].update(momentum=-1.0),
            ValueError,
            r"momentum is -1\.0; it must be 0 or more",
        ),
        (
            lambda saved: saved["param_groups"][0].update(dampening=float("nan")),
            ValueError,
            "dampening is nan; it must be a number",
        ),
        (
            lambda saved: saved["param_groups"][0].update(params=[0, 1]),
            ValueError,
            "doesn't match the size of optimizer's group",
        ),
    ],
    ids=["shape", "int32", "float", "Adam", "maximize", "momentum", "dampening", "length"],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(
    spoil: Any, error: type[Exception], sentence: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, **OPTIONS)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    with Unchanged(optimizer), pytest.raises(error, match=sentence):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_goes_on_as_the_original(how: str, device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, **OPTIONS, wd_after_momentum=True, materialize_master_grads=False)
    train(optimizer, params, range(3))
    other = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert (other.wd_after_momentum, other.materialize_master_grads) == (True, False)
    others = other.param_groups[0]["params"]
    for each, its in ((optimizer, params), (other, others)):
        train(each, its, range(3, 6))
    assert_same_state(other, optimizer)


def test_a_buffer_that_torch_has_not_made_yet_is_none_of_ours(device: torch.device) -> None:
    params = make_params(device)
    saved = torch.optim.SGD(params, 0.5).state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    optimizer = FusedSGD(params, **OPTIONS)
    optimizer.load_state_dict(saved)
    assert buffers_of(optimizer, params) == [None] * len(params)
    train(optimizer, params, [0])
