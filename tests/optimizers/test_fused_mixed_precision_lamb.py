"""FusedMixedPrecisionLamb is FusedLAMB with masters, and with numbers on the device."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from fused_adam_cases import BF16, F16, F32, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FusedLAMB, FusedMixedPrecisionLamb

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.6, 0.9), "weight_decay": 0.1}


def make_params(device: torch.device, dtype: torch.dtype) -> list[Parameter]:
    torch.manual_seed(3)
    return [Parameter(torch.randn(size, device=device).to(dtype)) for size in (5, 40)]


def give(params: list[Parameter], step: int, scale: float = 1.0) -> None:
    torch.manual_seed(step)
    for param in params:
        param.grad = torch.randn_like(param) * scale


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("way", ["plain", "scaler", "argument"])
def test_each_step_is_that_of_fused_lamb(
    way: str, dtype: torch.dtype, device: torch.device
) -> None:
    params, theirs = make_params(device, dtype), make_params(device, dtype)
    reduced = None if dtype == F32 else dtype
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}]
    optimizer = FusedMixedPrecisionLamb(groups, reduced_precision_dtype=reduced, **OPTIONS)
    groups = [{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.02}]
    expected = FusedLAMB(groups, master_weights=reduced is not None, **OPTIONS)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, enabled=way != "plain")
    taken = 0
    for number in range(5):
        scaler.scale(torch.zeros((), device=device))
        give(params, number, scaler.get_scale())
        is_bad = way != "plain" and number in (0, 3)
        if is_bad:
            params[1].grad[7] = math.inf  # type: ignore[index]
        if way == "argument":
            optimizer.step(grad_scaler=scaler)
            scaler.update(scaler.get_scale() / (2 if is_bad else 1))
        else:
            scaler.step(optimizer)
            scaler.update()
        taken += not is_bad
        if not is_bad:
            give(theirs, number)
            expected.step()
        for group in optimizer.param_groups:
            group["lr"].mul_(0.5)  # as a schedule on the device
            assert (group["step"].tolist(), group["step"].dtype) == ([taken], torch.int32)
        for group in expected.param_groups:
            group["lr"] *= 0.5
    for param, wanted in zip(params, theirs, strict=True):
        assert_same_bits(param.detach(), wanted.detach())


def test_a_run_goes_on_from_a_file_a_copy_and_a_step(device: torch.device) -> None:
    def make(step: int = 0) -> tuple[FusedMixedPrecisionLamb, list[Parameter]]:
        params = make_params(device, F16)
        options = {**OPTIONS, "reduced_precision_dtype": F16}
        return FusedMixedPrecisionLamb(params, step=step, **options), params

    optimizer, params = make(step=7)
    for number in range(2):
        give(params, number)
        optimizer.step()
    assert optimizer.param_groups[0]["step"].item() == 9
    assert {state["step"].item() for state in optimizer.state.values()} == {9.0}
    others = [(copy.deepcopy(optimizer), None), (pickle.loads(pickle.dumps(optimizer)), None)]
    loaded, own = make()
    loaded.load_state_dict(optimizer.state_dict())
    for param, written in zip(own, params, strict=True):
        param.data.copy_(written)
    for other, given in [(optimizer, params), *others, (loaded, own)]:
        its = given or other.param_groups[0]["params"]
        give(its, 5)
        other.step()
        assert other.param_groups[0]["step"].tolist() == [10]
        assert other.reduced_precision_dtype == F16
        for param, wanted in zip(its, params, strict=True):
            assert_same_bits(param.detach(), wanted.detach())
            assert_same_bits(other.master(param), optimizer.master(wanted))


def test_a_file_of_apex_has_its_count_in_the_group(device: torch.device) -> None:
    params = make_params(device, F16)
    optimizer = FusedMixedPrecisionLamb(params, reduced_precision_dtype=F16)
    moments: dict[int, dict[str, Tensor]] = {
        index: {name: torch.rand(len(param)) for name in ("exp_avg", "exp_avg_sq")}
        for index, param in enumerate(params)
    }
    group = {"lr": torch.tensor(0.5), "step": torch.tensor([4]), "betas": (0.9, 0.99), "eps": 1e-6}
    group |= {"weight_decay": 0.1, "bias_correction": True, "grad_averaging": True}
    group |= {"max_grad_norm": 1.0, "params": [0, 1]}
    optimizer.load_state_dict({"state": moments, "param_groups": [group]})
    (loaded,) = optimizer.param_groups
    assert (loaded["lr"].item(), loaded["step"].tolist()) == (0.5, [4])
    assert loaded["lr"].device == loaded["step"].device == params[0].device
    for index, param in enumerate(params):
        assert optimizer.state[param]["step"].item() == 4.0
        assert torch.equal(optimizer.state[param]["exp_avg"].cpu(), moments[index]["exp_avg"])


def test_masters_can_be_asked_for_later_and_other_dtypes_are_refused(device: torch.device) -> None:
    params = make_params(device, BF16)
    optimizer = FusedMixedPrecisionLamb(params)
    assert optimizer.param_groups_full_precision == [{"params": [None, None]}]
    optimizer.reduced_precision_dtype = BF16
    masters = optimizer.param_groups_full_precision[0]["params"]
    assert [master.dtype for master in masters] == [F32, F32]
    with pytest.raises(ValueError, match=r"reduced_precision_dtype is torch\.float64; it must be"):
        FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float64)
    give(params, 1)
    other = FusedMixedPrecisionLamb(params)
    with pytest.warns(RuntimeWarning, match=r"FusedMixedPrecisionLamb\(\.\.\., reduced_precision_"):
        other.step()
