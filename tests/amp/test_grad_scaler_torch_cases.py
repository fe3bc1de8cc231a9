"""Cases of PyTorch's own tests of its GradScaler (test_cuda.py, test_torch.py) that the random
programs of test_grad_scaler.py leave out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from grad_scaler_cases import new_scaler
from torch import nn
from torch.nn import Parameter

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

Optimizer: TypeAlias = torch.optim.Optimizer
SKIPPED = 2  # the iteration whose gradients overflow, of four
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=[*MAKERS])


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randn(4, 2, 8, 8, generator=generator).to(device)
    return [(inputs, targets) for inputs, targets in pairs]


def models(device: torch.device) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    return model, copy.deepcopy(model)


def overflow(model: Any) -> None:
    model[1].weight.grad.fill_(math.inf)


def test_scale_multiplies_nested_outputs_wherever_they_are(device: torch.device) -> None:
    scaler = GradScaler(device.type, init_scale=2.0)
    here, there = torch.full((1,), 4.0, device=device), torch.full((1,), 4.0)
    outputs = (here.clone(), (there.clone(), here.clone()), [there, (here, there)])
    scaled = scaler.scale(outputs)
    assert [type(one) for one in scaled] == [torch.Tensor, tuple, list]
    flat = [scaled[0], *scaled[1], scaled[2][0], *scaled[2][1]]
    assert [one.item() for one in flat] == [8.0] * 6
    assert [one.device.type for one in flat[:2]] == [device.type, "cpu"]
    assert scaler._scale.device.type == device.type


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_unscale_multiplies_gradients_of_any_layout_and_finds_inf_and_nan(
    bad: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    def gradient(layout: str) -> torch.Tensor:
        grad = torch.full((20, 20), 4.0, dtype=dtype, device=device)
        return {"dense": grad, "transposed": grad.t(), "with gaps": grad[:, :5]}[layout]

    for layouts in (
        ("dense", "dense"),
        ("dense", "transposed"),
        ("dense", "with gaps"),
        ("with gaps", "with gaps"),
    ):
        params = []
        for layout in layouts:
            grad = gradient(layout)
            params.append(Parameter(torch.zeros_like(grad)))
            params[-1].grad = grad
        if bad is not None:
            params[-1].grad[2, 2] = bad
        scaler = new_scaler(device, init_scale=4.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert sum(each.item() for each in found.values()) == (bad is not None)
        assert set(params[0].grad.flatten().tolist()) == {1.0}


@pytest.mark.parametrize("used", [False, True], ids=["before a loss", "after a loss"])
def test_a_state_dict_replaces_every_number(used: bool, device: torch.device) -> None:
    source = GradScaler(
        device.type, init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
    )
    target = GradScaler(
        device.type, init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
    )
    target._init_growth_tracker = 7
    if used:
        target.scale(torch.full((1,), 4.0, device=device))
    target.load_state_dict(source.state_dict())
    assert target.get_scale() == 3.0
    assert target.get_growth_factor() == 4.0
    assert target.get_backoff_factor() == 0.5
    assert target.get_growth_interval() == 2
    assert target._get_growth_tracker() == 0
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        target.load_state_dict({})


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("spread", [False, True], ids=["one device", "the CPU too"])
@each_maker
def test_two_models_two_optimizers_and_two_losses(
    make: Any, spread: bool, enabled: bool, device: torch.device
) -> None:
    devices = [device, torch.device("cpu") if spread else device]
    pairs = [models(each) for each in devices]
    optimizers = [[make(model.parameters()) for model in pair] for pair in pairs]
    scaler = GradScaler(device.type, init_scale=128.0, growth_interval=1, enabled=enabled)
    for number, (inputs, targets) in enumerate(batches(device)):
        for side in (0, 1):  # the reference, and ours
            for pair in optimizers:
                pair[side].zero_grad()
            first = pairs[0][side](inputs)
            second = pairs[1][side](inputs.to(devices[1]))
            losses = [
                nn.functional.mse_loss(a * first + b * second.to(device), targets)
                for a, b in ((0.3, 0.7), (0.6, -0.4))
            ]
            if side == 0:
                torch.stack(losses).sum().backward()
                optimizers[0][0].step()
                if not (enabled and number == SKIPPED):
                    optimizers[1][0].step()
                continue
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            if enabled and number == SKIPPED:
                overflow(pairs[1][1])
            scaler.unscale_(optimizers[0][1])
            scaler.step(optimizers[0][1])
            scaler.step(optimizers[1][1])
            scaler.update()
            if enabled:
                assert scaler.step_was_skipped(optimizers[1][1]) == (number == SKIPPED)
                assert not scaler.step_was_skipped(optimizers[0][1])
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    for reference, model in pairs:
        for wanted, param in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6)


def test_a_cuda_scaler_without_cuda_is_disabled_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(
        UserWarning, match="GradScaler is enabled, but CUDA is not available"
    ) as said:
        scaler = GradScaler()
    (one,) = said
    assert one.filename == __file__
    assert 'On the CPU use GradScaler("cpu")' in str(one.message)
    assert not scaler.is_enabled()
    weight = Parameter(torch.ones(3))
    weight.sum().backward()
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    assert weight.tolist() == [0.0] * 3
