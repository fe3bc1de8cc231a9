"""Moments in bfloat16: a step is that of float32 moments, which are then rounded to nearest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_adam_cases import NAMES, copies_of, give_grads, grad_for
from rule_cases import MAKERS, copy_master, make_params
from tolerances import assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.optimizers import FusedAdam

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

each_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=[*MAKERS])


def make_narrow(make: Any, params: Any, **options: Any) -> Any:
    """Every optimizer takes the option of a group; FusedAdam has it as an argument, too."""
    optimizer = make(params, **options)
    for group in optimizer.param_groups:
        group["moment_dtype"] = BF16
    return optimizer


def moments_of(state: Any) -> dict[str, Tensor]:
    """The tensors of state but masters; step counts and NovoGrad's norms are numbers."""
    return {name: value for name, value in state.items() if value.dim() or value.dtype == BF16}


def widened(value: Any) -> Any:
    return value.float() if torch.is_tensor(value) and value.dtype == BF16 else copy.deepcopy(value)


def test_options_in_a_file_are_plain_values() -> None:
    optimizer = FusedAdam([Parameter(torch.ones(3))], moment_dtype=BF16, stochastic_rounding=True)
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["moment_dtype"] == "bfloat16"
    assert {type(value) for value in group.values()} <= {bool, int, float, str, tuple, list}
    assert optimizer.param_groups[0]["moment_dtype"] is BF16


@each_optimizer
@pytest.mark.parametrize("masters", [False, "float32", True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=NAMES.get)
@pytest.mark.usefixtures("cpu_level")
def test_a_step_is_that_of_float32_moments_rounded(
    dtype: torch.dtype, masters: Any, make: Any, device: torch.device
) -> None:
    params = make_params(device, dtype)
    narrow = make_narrow(make, params, master_weights=masters)
    for step in range(3):
        wide_params = copies_of(params)
        wide = make(wide_params, master_weights=masters)
        for param, twin in zip(params, wide_params, strict=True):
            if param in narrow.state:
                wide.state[twin] = {k: widened(v) for k, v in narrow.state[param].items()}
            copy_master(narrow, param, wide, twin)
        give_grads(params, step, values=dtype)
        give_grads(wide_params, step, values=dtype)
        narrow.step()
        wide.step()
        for param, twin in zip(params, wide_params, strict=True):
            assert_same_bits(narrow.master(param), wide.master(twin))
            assert_same_bits(param.detach(), twin.detach())
            moments = moments_of(narrow.state[param])
            assert moments
            assert {moment.dtype for moment in moments.values()} == {BF16}
            for name, moment in moments.items():
                assert_same_bits(moment, wide.state[twin][name].to(BF16))


@each_optimizer
def test_gradients_are_unscaled_in_place_beside_them(make: Any, device: torch.device) -> None:
    params = make_params(device, F32)
    twins = copies_of(params)
    scaled, plain = make_narrow(make, params), make_narrow(make, twins)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    for step in range(2):
        give_grads(params, step, factor=4.0)
        give_grads(twins, step)
        scaler.scale(torch.ones((), device=device))
        scaler.step(scaled)
        scaler.update()
        plain.step()
        for param, twin in zip(params, twins, strict=True):
            assert_same_bits(param.grad, twin.grad)
            assert_same_bits(param.detach(), twin.detach())


@each_optimizer
def test_float64_gradients_are_stepped_with_in_float64(make: Any, device: torch.device) -> None:
    params = make_params(device, F32)
    twins = copies_of(params)
    narrow, wide = make_narrow(make, params), make(twins)
    grads = [grad_for(param, 0, index, F64) / 3.0 for index, param in enumerate(params)]
    narrow.step(grads=grads)
    wide.step(grads=grads)
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(param.detach(), twin.detach())
        for name, moment in moments_of(narrow.state[param]).items():
            assert_same_bits(moment, wide.state[twin][name].to(BF16))


def test_float64_parameters_keep_float64_moments(device: torch.device) -> None:
    params = make_params(device, F64)
    plain = FusedAdam(copies_of(params))
    optimizer = FusedAdam(params, moment_dtype=BF16)
    for step in range(2):
        for each in (plain, optimizer):
            give_grads(each.param_groups[0]["params"], step)
            each.step()
    for param, expected in zip(params, plain.param_groups[0]["params"], strict=True):
        assert_same_bits(param.detach(), expected.detach())


@pytest.mark.parametrize(("masters", "size"), [(False, 4), ("float32", 8), (True, 6)])
def test_a_state_takes_four_bytes_an_element_beside_the_master(
    masters: Any, size: int, device: torch.device
) -> None:
    param = Parameter(torch.ones(1000, dtype=F16, device=device))
    optimizer = FusedAdam([param], master_weights=masters, moment_dtype=BF16)
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = [value for value in optimizer.state[param].values() if value.dim()]
    kept = [*optimizer._own_masters.kept.values()]
    assert sum(value.nbytes for value in (*state, *kept)) == 1000 * size


each_rounding = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])


@each_rounding
def test_a_skipped_step_changes_no_byte(stochastic: bool, device: torch.device) -> None:
    params = make_params(device, F16)
    optimizer = FusedAdam(
        params, 0.1, master_weights="split", moment_dtype=BF16, stochastic_rounding=stochastic
    )
    scaler = amp.GradScaler(device.type, init_scale=4.0)
    for bad in (False, True, False, True):
        before = copy.deepcopy([params, [*map(optimizer.state.get, params)]])
        scaler.scale(torch.ones((), device=device))
        give_grads(params, 0)
        if bad:
            params[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer) == bad
        for param, value, state in zip(params, *before, strict=True):
            if bad:
                assert_same_bits(param.detach(), value.detach())
                for name, old in state.items():
                    assert torch.equal(old, optimizer.state[param][name])


def train(optimizer: Any, steps: range) -> None:
    for step in steps:
        give_grads(optimizer.param_groups[0]["params"], step)
        optimizer.step()


@pytest.mark.parametrize(("saved", "loaded"), [(F32, BF16), (BF16, F32)])
def test_a_checkpoint_may_have_the_other_dtype(
    saved: torch.dtype, loaded: torch.dtype, device: torch.device
) -> None:
    params = make_params(device, F16)
    first = FusedAdam(params, moment_dtype=saved)
    train(first, range(3))
    second = FusedAdam(copies_of(params), moment_dtype=loaded)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.param_groups[0].get("moment_dtype", F32) == loaded
    second.param_groups[0].update(lr=0.0, betas=(0.0, 0.0))
    train(second, range(3, 4))
    for param in second.param_groups[0]["params"]:
        state = second.state[param]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (loaded, loaded)


def test_torchs_adamw_loads_it(device: torch.device) -> None:
    params = make_params(device, F32)
    ours = FusedAdam(params, lr=0.01, moment_dtype=BF16)
    train(ours, range(3))
    twins = copies_of(params)
    theirs = torch.optim.AdamW(twins, lr=0.01, weight_decay=0.0)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(ours, range(3, 4))
    train(theirs, range(3, 4))
    for param, twin in zip(params, twins, strict=True):
        assert_near(param, twin)
