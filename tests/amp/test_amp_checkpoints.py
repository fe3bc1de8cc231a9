"""amp.initialize: checkpoints that go on bit for bit, and that others can read."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from amp_level_cases import (
    F32,
    OPTIMIZERS,
    Net,
    backward,
    batches,
    dtypes,
    initialize,
    train,
    train_plain,
)
from fp16_cases import pull
from tolerances import assert_same_bits
from torch import nn

from apex_mp import amp, fp16_utils
from apex_mp.amp import _amp_state
from apex_mp.scale.amp_scaler import LossScaler

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("amp_off"),
    pytest.mark.filterwarnings("ignore:.*buffers have no masters"),
]


makes = pytest.mark.parametrize(
    "make",
    [OPTIMIZERS["SGD"], OPTIMIZERS["Adam"], OPTIMIZERS["FusedAdam"]],
    ids=["SGD", "Adam", "FusedAdam"],
)


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def checkpoint(model: Any, optimizer: Any) -> Any:
    return saved_and_loaded(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
    )


def start(level: str, dtype: torch.dtype, model: nn.Module, optimizer: Any) -> None:
    """Initialize with a scale that overflows at first and grows again within the steps."""
    loss_scale = None if level == "O0" else "dynamic"
    initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=loss_scale)
    for scaler in _amp_state.loss_scalers:
        if scaler.dynamic:
            scaler.value = dataclasses.replace(scaler.value, scale=2.0**20, growth_interval=4)


# What is in a checkpoint of O2.


def trained(level: str = "O2", make: Any = OPTIMIZERS["Adam"], **options: Any) -> tuple[Any, Any]:
    model = Net()
    optimizer = make(model.parameters())
    initialize(model, optimizer, opt_level=level, **options)
    train(model, optimizer, 2)
    return model, optimizer


@dtypes
@pytest.mark.parametrize("load_first", [True, False])
def test_a_checkpoint_of_one_level_goes_on_at_another(load_first: bool, dtype: torch.dtype) -> None:
    for saved_level, level in itertools.permutations(("O0", "O1", "O2", "O3"), 2):
        model, optimizer = trained(saved_level, OPTIMIZERS["SGD"], dtype=dtype)
        saved = checkpoint(model, optimizer)
        expected = train(model, optimizer, 5, start=2)

        torch.manual_seed(1)
        model = Net()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        if not load_first:
            initialize(model, optimizer, opt_level=level, dtype=dtype)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if load_first:
            initialize(model, optimizer, opt_level=level, dtype=dtype)
        torch.testing.assert_close(train(model, optimizer, 5, start=2), expected, rtol=0.02, atol=0)


@dtypes
@pytest.mark.parametrize("keep_batchnorm_fp32", [True, False])
def test_a_model_saves_its_masters_in_float32(
    keep_batchnorm_fp32: bool, dtype: torch.dtype
) -> None:
    model, optimizer = trained(dtype=dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
    state = model.state_dict()
    plain = Net()
    assert state.keys() == plain.state_dict().keys()
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {F32}
    names = [name for name, _ in plain.named_parameters()]
    for name, master in zip(names, amp.master_params(optimizer), strict=True):
        assert_same_bits(state[name], master.detach())
    assert any(not torch.equal(state[name], state[name].to(dtype).float()) for name in names)
    plain.load_state_dict(state)
    images, _ = next(batches(1))
    torch.testing.assert_close(plain.eval()(images), model.eval()(images), rtol=0, atol=5e-2)


@makes
def test_a_float32_script_goes_on_from_a_checkpoint_of_o2_and_back(make: Any) -> None:
    model, optimizer = trained(make=make)
    saved = checkpoint(model, optimizer)
    initialize(model, enabled=False)
    plain = Net()
    plain_optimizer = make(plain.parameters())
    plain.load_state_dict(saved["model"])
    plain_optimizer.load_state_dict(saved["optimizer"])
    train_plain(plain, plain_optimizer, 2, start=2)
    state, optimizer_state = saved_and_loaded([plain.state_dict(), plain_optimizer.state_dict()])
    expected = train_plain(plain, plain_optimizer, 2, start=4)

    again = Net()
    again_optimizer = make(again.parameters())
    initialize(again, again_optimizer, opt_level="O2")
    again.load_state_dict(state)
    again_optimizer.load_state_dict(optimizer_state)
    masters = amp.master_params(again_optimizer)
    for (name, _), master in zip(again.named_parameters(), masters, strict=True):
        assert_same_bits(master.detach(), state[name])
    losses = train(again, again_optimizer, 2, start=4)
    # Two steps with every product rounded to float16.
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-3)


def scales() -> list[tuple[float, int]]:
    return [(scaler.loss_scale(), scaler._unskipped) for scaler in _amp_state.loss_scalers]


FILE_OF_2019 = OrderedDict(
    loss_scaler0={"loss_scale": 2.0**10, "unskipped": 7},
    loss_scaler1={"loss_scale": 2.0**11, "unskipped": 8},
)


def test_files_of_2019_are_read() -> None:
    initialize(nn.Linear(1, 1), opt_level="O2", num_losses=2)
    amp.load_state_dict(saved_and_loaded(FILE_OF_2019))
    assert scales() == [(2.0**10, 7), (2.0**11, 8)]


GRAD_SCALER = {
    "scale": 2.0**10,
    "growth_factor": 4.0,
    "backoff_factor": 0.125,
    "growth_interval": 7,
    "_growth_tracker": 3,
}


def test_loss_scalers_that_were_pickled_are_taken_over() -> None:
    initialize(nn.Linear(1, 1), opt_level="O1", num_losses=3)
    of_amp, dynamic = LossScaler(scale_window=9), fp16_utils.DynamicLossScaler(2.0**20)
    of_amp._unskipped = 4
    dynamic.update_scale(True)
    amp.load_state_dict(
        {
            "loss_scaler0": of_amp,
            "loss_scaler1": dynamic,
            "loss_scaler2": fp16_utils.LossScaler(64.0),
        }
    )
    assert scales() == [(2.0**16, 4), (2.0**19, 0), (64.0, 0)]
    windows = [scaler.value.growth_interval for scaler in _amp_state.loss_scalers]
    assert windows == [9, 1000, 2000]


UNREADABLE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unexpected keys": (
        {"model": {}, "loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}, "epoch": 3},
        RuntimeError,
        r'Error\(s\) in loading state_dict. Unexpected key\(s\) in state_dict: "model", "epoch". ',
    ),
    "entry missing": (
        {**FILE_OF_2019, "loss_scaler1": {"loss_scale": 2.0}},
        KeyError,
        "unskipped",
    ),
    "no number": (
        {**FILE_OF_2019, "loss_scaler1": {"loss_scale": "2", "unskipped": 1}},
        TypeError,
        "scale is '2'; it must be a number",
    ),
    "a GradScaler out of range": (
        {**GRAD_SCALER, "scale": 0.0},
        ValueError,
        "scale is 0.0; it must lie in",
    ),
    "half a GradScaler": (
        {"scale": 1.0, "growth_factor": 2.0},
        ValueError,
        "keys .'backoff_factor', 'growth_interval', '_growth_tracker'. are missing",
    ),
    "out of range": (
        {**FILE_OF_2019, "loss_scaler1": {"loss_scale": 0.0, "unskipped": 1}},
        ValueError,
        "scale is 0.0; it must lie in",
    ),
}


@pytest.mark.parametrize(("state", "error", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read_changes_nothing(
    state: dict[str, Any], error: type[Exception], message: str
) -> None:
    initialize(nn.Linear(1, 1), opt_level="O2", num_losses=2)
    with pytest.raises(error, match=message):
        amp.load_state_dict(state)
    assert scales() == [(2.0**16, 0), (2.0**16, 0)]


def test_the_state_of_all_scales_is_saved_as_plain_values() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    initialize(model, optimizer, opt_level="O1", num_losses=2)
    backward(optimizer, pull((model.weight, [[1.0]])), loss_id=0)
    backward(optimizer, pull((model.weight, [[float("inf")]])), loss_id=1)
    state = amp.state_dict()
    assert isinstance(state, OrderedDict)
    assert [*state] == ["loss_scaler0", "loss_scaler1"]
    old = [(part["loss_scale"], part["unskipped"]) for part in state.values()]
    assert old == [(2.0**16, 1), (2.0**15, 0)]
    assert {type(value) for part in state.values() for value in part.values()} <= {float, int}
    destination: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert destination == {"mine": 1, **state}
    initialize(nn.Linear(1, 1), opt_level="O1", num_losses=2)
    amp.load_state_dict(saved_and_loaded(state))
    assert scales() == [(2.0**16, 1), (2.0**15, 0)]
