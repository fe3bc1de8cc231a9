"""AveragedMasters: the average of masters, in float32, is that of float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from apex_mp import AveragedMasters, amp
from apex_mp.amp import GradScaler
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedSGD

DECAY, STEPS = 0.9999, 300


def net(device: torch.device) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(device)
    nn.init.ones_(model[0].weight)
    return model


def loop(way: str, device: torch.device) -> tuple[nn.Module, Any, Any, Any]:
    """Return model, optimizer, a function that steps, and one that returns the mean master."""
    model = net(device)
    if way == "O2":
        optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0
        )
    elif way == "FP16_Optimizer":
        model[0].half()
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), 1e-3), 8.0, verbose=False)
    else:
        model[0].half()
        masters: Any = {"masters": True, "split masters": "split", "no masters": False}[way]
        optimizer = FusedSGD(model.parameters(), 1e-3, master_weights=masters)
    scaler = GradScaler(device.type, init_scale=8.0)

    def step() -> None:
        optimizer.zero_grad()
        loss = model[0].weight.float().sum() + model[1].weight.sum()
        if way == "O2":
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        elif way == "FP16_Optimizer":
            optimizer.backward(loss)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def value() -> float:
        if way == "O2":
            return next(iter(amp.master_params(optimizer))).double().mean().item()
        if way == "FP16_Optimizer":
            return optimizer.fp32_from_fp16_groups[0][0].double().mean().item()
        return optimizer.master(model[0].weight).double().mean().item()

    return model, optimizer, step, value


@pytest.mark.usefixtures("amp_off")
@pytest.mark.filterwarnings("ignore:.*have no float32 masters")
@pytest.mark.filterwarnings("ignore:.*that have no")
@pytest.mark.parametrize("way", ["masters", "split masters", "no masters", "FP16_Optimizer", "O2"])
def test_the_average_is_that_of_float64(way: str, device: torch.device) -> None:
    model, optimizer, step, value = loop(way, device)
    averaged = AveragedMasters(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected = 1.0
    for number in range(STEPS):
        step()
        averaged.update_parameters(model)
        expected = value() if number == 0 else DECAY * expected + (1.0 - DECAY) * value()
    weight = averaged.module[0].weight
    assert weight.dtype is torch.float32
    assert weight.double().mean().item() == pytest.approx(expected, abs=2e-6)
    assert 1.0 - expected > 1e-3


def test_a_copy_goes_on_averaging(device: torch.device) -> None:
    """Alone over the same masters; with model and optimizer over the masters of that copy."""
    model, optimizer, step, value = loop("masters", device)
    averaged = AveragedMasters(model, optimizer, avg_fn=lambda old, new, count: new)
    alone = copy.deepcopy(averaged)
    other_model, _, pair = copy.deepcopy((model, optimizer, averaged))
    step()
    alone.update_parameters(model)
    pair.update_parameters(other_model)
    assert alone.module[0].weight.double().mean().item() == value()
    assert pair.module[0].weight.double().mean().item() == 1.0


def test_it_is_saved_and_loaded_as_torchs(device: torch.device) -> None:
    model, optimizer, step, _ = loop("masters", device)
    averaged = AveragedMasters(model, optimizer)
    step()
    averaged.update_parameters(model)
    for name, value in averaged.module.state_dict().items():
        if value.is_floating_point():
            assert value.dtype is torch.float32, name
    other = AveragedMasters(net(device), [])
    other.load_state_dict(averaged.state_dict())
    twin = copy.deepcopy(other)
    for one, two in zip(twin.parameters(), averaged.parameters(), strict=True):
        assert torch.equal(one, two)
    assert int(twin.n_averaged) == 1


def test_an_optimizer_of_another_model_is_refused(device: torch.device) -> None:
    model, optimizer, _, _ = loop("masters", device)
    with pytest.raises(ValueError, match=r"AveragedMasters: the optimizer, a FusedSGD, steps no"):
        AveragedMasters(net(device), optimizer)
    with pytest.raises(TypeError, match="AveragedMasters"):
        AveragedMasters(model, "SGD")
