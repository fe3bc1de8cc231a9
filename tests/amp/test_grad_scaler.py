"""apex_mp.amp.GradScaler: torch's to the bit where torch works, and float16 gradients beyond it."""

from __future__ import annotations

import copy
import math
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
    assert_same_state,
    copies_of,
    give_grads,
    make_params,
)
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp import fp16_utils
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

each_optimizer = pytest.mark.parametrize(
    "make", [*OURS.values(), *OF_TORCH.values()], ids=[*OURS, *OF_TORCH]
)
each_of_ours = pytest.mark.parametrize("make", OURS.values(), ids=[*OURS])


# --- As torch's.


def test_a_checkpoint_goes_to_torch_and_back(device: torch.device) -> None:
    ours, theirs = new_scaler(device, init_scale=8.0), new_scaler(device, torch.amp.GradScaler)
    params = make_params(device)
    optimizer = FusedAdam(params)
    for step, bad in enumerate([None, math.inf, None]):
        give_scaled(ours, params, step, bad)
        ours.step(optimizer)
        ours.update()
    saved = ours.state_dict()
    assert saved.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(saved)
    assert theirs.state_dict() == saved
    assert theirs.state_dict()["_growth_tracker"] == 1
    again = GradScaler(device.type)
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == saved
    assert again.scale(torch.ones((), device=device)).item() == 4.0


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_as_the_original(copied: Any, used: bool, device: torch.device) -> None:
    model = torch.nn.Linear(2, 2).to(device)
    scaler = new_scaler(device, min_scale=1.0, hysteresis=2, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = [*model.parameters()]
    for step, bad in enumerate([math.inf, None] if used else []):
        give_scaled(scaler, params, step, bad)
        scaler.step(optimizer)
        scaler.update()
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict()
    assert scaler.state_dict()["overflows"] == used
    give_scaled(scaler, params, 5, math.inf)
    scales = []
    for each in (scaler, other):
        each.scale(torch.zeros((), device=device))
        each.step(optimizer)
        assert each.step_was_skipped(optimizer)
        each.update()
        scales.append(each.get_scale())
    assert scales[0] == scales[1] == (2.0**9 if used else 2.0**10)


# --- float16 gradients.


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
@each_optimizer
@pytest.mark.filterwarnings("ignore:GradScaler.*no float32 masters:RuntimeWarning")
def test_unscale_takes_gradients_of_any_dtype_and_leaves_torch_numbers(
    make: Any, dtype: torch.dtype, scale: float, device: torch.device
) -> None:
    params = make_params(device, dtype)
    theirs = copies_of(params)
    give_grads(params, 0, factor=100.0)
    for param, their in zip(params, theirs, strict=True):
        their.grad = param.grad.clone()
    scaler = new_scaler(device, init_scale=scale)
    scaler.unscale_(make(params))
    expected = new_scaler(device, torch.amp.GradScaler, init_scale=scale)
    inverse = expected._scale.double().reciprocal().float()
    flag = torch.zeros((), device=device)
    expected._unscale_grads_(torch.optim.SGD(theirs), inverse, flag, True)
    for param, their in zip(params, theirs, strict=True):
        assert_same_bits(param.grad, their.grad)


@each_of_ours
@pytest.mark.filterwarnings("ignore:GradScaler.*no float32 masters:RuntimeWarning")
def test_a_half_model_trains_through_unscale_and_step(make: Any, device: torch.device) -> None:
    params = make_params(device, F16)
    theirs = copies_of(params)
    optimizer, expected = make(params), make(theirs)
    scaler = new_scaler(device)
    for step in range(12):
        bad = math.nan if step in (2, 3, 7) else None
        give_scaled(scaler, params, step, bad, values=BF16)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer) == (bad is not None)
        if bad is None:
            give_grads(theirs, step, values=BF16)
            expected.step()
    assert_same_state(optimizer, expected)


def test_any_torch_optimizer_steps_masters_of_a_half_model(device: torch.device) -> None:
    # As scripts have it: fp32 masters are made by prep_param_lists.
    model = torch.nn.Linear(4, 3).to(device).half()
    model_params, masters = fp16_utils.prep_param_lists(model)
    expected = copies_of(masters)
    optimizer, plain = torch.optim.AdamW(masters), torch.optim.AdamW(expected)
    scaler = new_scaler(device)
    for step in range(5):
        give_scaled(scaler, model_params, step)
        fp16_utils.model_grads_to_master_grads(model_params, masters)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        fp16_utils.master_params_to_model_params(model_params, masters)
        scaler.update()
        give_grads(expected, step)
        plain.step()
    for param, master, wanted in zip(model_params, masters, expected, strict=True):
        assert_same_bits(master.detach(), wanted.detach())
        assert_same_bits(param.detach(), wanted.detach().half())


def test_a_gradient_that_two_parameters_share_is_unscaled_once(device: torch.device) -> None:
    params = [Parameter(torch.ones(3, device=device)) for _ in range(2)]
    params[0].grad = params[1].grad = torch.full((3,), 1024.0, device=device)
    new_scaler(device).unscale_(torch.optim.SGD(params))
    assert params[0].grad.tolist() == [1.0] * 3
