"""FP16_Optimizer reads what others wrote: the old eras, plain optimizers, GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, FACES, assert_same, everything, faces, parameter, pull
from torch import nn

from apex_mp import fp16_utils
from apex_mp.optimizers import FusedAdam
from apex_mp.scale.amp_scaler import LossScaler as AmpLossScaler

SHAPES = ((3, 2), (4,), (5,))
ADAMS: dict[str, Any] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
adams = pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS.keys())
loaders = pytest.mark.parametrize("loader", FACES.values(), ids=FACES.keys())

GRAD_SCALER = {
    "scale": 512.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 5,
    "_growth_tracker": 3,
}


def values(offset: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) + offset for shape in SHAPES]


def params_of(device: torch.device, *dtypes: torch.dtype, offset: float = 0.0) -> list[Any]:
    return [
        parameter(value, dtype, device)
        for value, dtype in zip(values(offset), dtypes or (F16, F32, BF16), strict=True)
    ]


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]


def trained_plain(make: Any, device: torch.device, *dtypes: torch.dtype) -> Any:
    params = params_of(device, *dtypes)
    optimizer = make(groups(params))
    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, 0.5 + step)
        optimizer.step()
    return optimizer


# The state of an optimizer of the same parameters that was not wrapped.


@adams
@pytest.mark.parametrize("saver", [torch.optim.Adam, torch.optim.AdamW], ids=["Adam", "AdamW"])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F32, BF16)], ids=["fp32", "mixed"])
@faces
def test_the_state_of_a_torch_adam_is_loaded(
    face: Any, dtypes: Any, saver: Any, make: Any, device: torch.device
) -> None:
    plain = trained_plain(saver, device, *dtypes)
    params = params_of(device)
    optimizer = face(make(groups(params)), 64.0, verbose=False)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.loss_scale == 64.0
    saved = [*plain.state.values()]
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    for master, state in zip(masters, saved, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[master][key].dtype == F32
            assert torch.equal(optimizer.state[master][key], state[key].float())
        assert float(optimizer.state[master]["step"]) == 3.0
    optimizer.backward(pull(*((param, 1.0) for param in params)))
    optimizer.step()
    assert {float(optimizer.state[master]["step"]) for master in masters} == {4.0}


@faces
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_grad_scalers_state_gives_the_loss_scale_and_nothing_else(
    dynamic: bool, face: Any, device: torch.device
) -> None:
    params = params_of(device)
    optimizer = face(ADAMS["AdamW"](groups(params)), 64.0, dynamic, verbose=False)
    optimizer.backward(pull(*((param, 0.0) for param in params)))
    optimizer.step()
    before = everything(optimizer, *params)
    optimizer.load_state_dict(GRAD_SCALER)
    assert_same(everything(optimizer, *params), before)
    theirs = torch.amp.GradScaler(device=device.type)
    theirs.load_state_dict(GRAD_SCALER)
    scales = []
    for bad in [0, 0, 1, 0, 0, 0, 0, 0, 1]:
        optimizer.loss_scaler.update_scale(bool(bad))
        theirs.scale(torch.ones(1, device=device))
        found_inf = torch.tensor(float(bad), device=device)
        torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, found_inf, 4.0, 0.25, 5)
        scales.append((optimizer.loss_scale, theirs.get_scale()))
    assert [ours for ours, _ in scales] == [their for _, their in scales]
    assert {ours for ours, _ in scales} == {512.0, 2048.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backoff_factor": 0.5}, "backoff_factor is 0.5 and growth_factor 4.0"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"growth_interval": None}, "growth_interval is None; it must be an int"),
        ({"_growth_tracker": ...}, "keys ['_growth_tracker'] are missing"),
    ],
)
@faces
def test_a_grad_scaler_that_cannot_be_taken_over_changes_nothing(
    face: Any, change: dict[str, Any], words: str, device: torch.device
) -> None:
    optimizer = face(ADAMS["AdamW"](groups(params_of(device))), 64.0, verbose=False)
    changed = {key: value for key, value in {**GRAD_SCALER, **change}.items() if value is not ...}
    with pytest.raises((TypeError, ValueError)) as raised:
        optimizer.load_state_dict(changed)
    assert words in str(raised.value)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (64.0, False)


# The loss scaler of amp, which the later FP16_Optimizer of fp16_utils had.


@loaders
def test_a_dynamic_scaler_of_amp_is_read(loader: Any, device: torch.device) -> None:
    scaler = AmpLossScaler("dynamic", 256.0, 2.0, 10, min_loss_scale=4.0, max_loss_scale=1024.0)
    scaler._unskipped = 8
    state = fp16_utils.FP16_Optimizer(
        ADAMS["AdamW"](groups(params_of(device))), verbose=False
    ).state_dict()
    del state["cur_iter"]
    state |= {"loss_scaler": scaler, "dynamic_loss_scale": True}
    optimizer = loader(ADAMS["AdamW"](groups(params_of(device))), 64.0, verbose=False)
    optimizer.load_state_dict(state)
    for bad in [0, 0, 1, *[0] * 30, *[1] * 12]:
        assert optimizer.loss_scale == scaler.loss_scale()
        optimizer.loss_scaler.update_scale(bool(bad))
        scaler.note_overflow(bool(bad))
        scaler.update_scale()
    assert optimizer.loss_scale == scaler.loss_scale() == 4.0


# The order of parameters until July 2018: first those with masters, then those of float32.


@adams
@loaders
def test_state_in_the_order_of_early_2018_is_put_into_ours(
    loader: Any, make: Any, device: torch.device
) -> None:
    saver = fp16_utils.FP16_Optimizer(make(params_of(device)), 64.0, verbose=False)
    params = [*saver.all_fp16_params, *saver.all_fp32_from_fp32_params]
    saver.backward(pull(*((param, 1.0) for param in params)))
    saver.step()
    state = copy.deepcopy(saver.state_dict())
    inner = state["optimizer_state_dict"]
    inner["param_groups"][0]["params"] = [7, 8, 9]
    inner["state"] = {new: inner["state"][old] for new, old in ((7, 0), (8, 2), (9, 1))}
    optimizer = loader(make(params_of(device)), 64.0, verbose=False)
    optimizer.load_state_dict(state)
    ours, theirs = optimizer.param_groups[0]["params"], saver.param_groups[0]["params"]
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == F32
        assert torch.equal(optimizer.state[our]["exp_avg"], saver.state[their]["exp_avg"])


@loaders
def test_flat_moments_of_another_length_name_the_group(loader: Any, device: torch.device) -> None:
    params = [nn.Parameter(torch.ones(n, device=device).half()) for n in (2, 3)]
    optimizer = loader(FusedAdam([{"params": [p]} for p in params]), verbose=False)
    state = fp16_utils.FP16_Optimizer(
        FusedAdam([{"params": [p]} for p in params]), verbose=False
    ).state_dict()
    del state["fp32_from_fp16"]
    state["fp32_groups_flat"] = [torch.ones(2), torch.ones(3)]
    state["optimizer_state_dict"]["state"] = {
        1: {"step": 1, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    }
    before = everything(optimizer, *params)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 in group 1 has shape \[4\]"):
        optimizer.load_state_dict(state)
    assert_same(everything(optimizer, *params), before)


@faces
def test_masters_that_the_model_does_not_contradict_stay(face: Any, device: torch.device) -> None:
    params = params_of(device)
    optimizer = face(ADAMS["AdamW"](groups(params)), 64.0, verbose=False)
    master = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        master += 2.0**-20  # Less than the model can hold.
        params[2].fill_(7.0)  # A model that was loaded after wrapping.
    assert not torch.equal(master, params[0].float())
    before = master.detach().clone()
    optimizer.load_state_dict(trained_plain(torch.optim.AdamW, device).state_dict())
    assert torch.equal(master, before)
    assert torch.equal(optimizer.param_groups[1]["params"][1], torch.full((5,), 7.0).to(device))
    assert torch.equal(params[2].float(), torch.full((5,), 7.0).to(device))


def test_hooks_may_make_a_state_of_what_is_none(device: torch.device) -> None:
    inner = ADAMS["AdamW"](groups(params_of(device)))
    optimizer = fp16_utils.FP16_Optimizer(inner, 64.0, verbose=False)
    saved = optimizer.state_dict()
    saved["optimizer_state_dict"]["param_groups"][0]["lr"] = 0.25
    inner.register_load_state_dict_pre_hook(lambda *_: saved["optimizer_state_dict"])
    optimizer.load_state_dict({**saved, "optimizer_state_dict": {"path": "state.pt"}})
    assert optimizer.param_groups[0]["lr"] == 0.25
