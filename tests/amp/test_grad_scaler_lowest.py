"""Skips without end: the scale does not become 0, and what a first step left behind is removed."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from fused_adam_cases import BF16, F16, F32
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam


def run(
    scaler: Any, optimizer: Any, factors: list[float], device: torch.device
) -> list[tuple[float, int]]:
    """Take a step with each factor on the weights in the loss; return scales and good steps."""
    (param,) = optimizer.param_groups[0]["params"]
    states = []
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((param.float() * factor).sum()).backward()
        # Memory that was used before.
        del_me = [torch.full((1000,), math.nan, device=device) for _ in range(50)]
        del del_me
        scaler.step(optimizer)
        scaler.update()
        states.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return states


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.Adam], ids=["FusedAdam", "Adam"])
def test_in_float32_the_scale_is_that_of_torch_but_never_0(make: Any, device: torch.device) -> None:
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        param = Parameter(torch.ones(1000, device=device))
        scaler = kind(device.type, growth_interval=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            factors = [1.0] * 4 + [math.nan] * 170
            results.append(run(scaler, make([param], lr=0.1), factors, device))
    ours, of_torch = results
    lowest = 2.0**-126
    assert ours == [(max(scale, lowest), good) for scale, good in of_torch]
    assert of_torch[-1][0] == 0.0


@pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf")
def test_after_skips_without_end_float32_weights_train(device: torch.device) -> None:
    param = Parameter(torch.ones(1000, device=device))
    optimizer, scaler = FusedAdam([param], lr=0.1), GradScaler(device.type)
    with pytest.warns(RuntimeWarning, match="has skipped 50 steps in a row, from its step 1 on"):
        run(scaler, optimizer, [math.nan] * 200, device)
    run(scaler, optimizer, [1.0], device)
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.9))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("make", [FusedAdam, torch.optim.Adam], ids=["FusedAdam", "Adam"])
def test_with_16_bit_gradients_the_scale_stays_at_1(
    make: Any, dtype: torch.dtype, device: torch.device
) -> None:
    param = Parameter(torch.ones(1000, device=device, dtype=dtype))
    options: Any = {"master_weights": True} if make is FusedAdam else {"eps": 1e-4}
    optimizer, scaler = make([("w", param)], lr=0.1, **options), GradScaler(device.type)
    name = make.__name__
    with pytest.warns(RuntimeWarning) as caught:
        run(scaler, optimizer, [1e-3] * 3 + [math.nan] * 40, device)
    said = [str(each.message) for each in caught if "lowest" in str(each.message)]
    assert said == [
        f"GradScaler: {name} has skipped 16 steps in a row, from its step 4 on, and the loss scale "
        "has come down to its lowest, 1, where small gradients are lost in float16. Gradients held "
        "inf or NaN at every scale. The worst: w [1000]: 0 inf, 1000 NaN. No scale cures a NaN: "
        "look for its cause, in the data or by apex_mp.monitor.find_nonfinite. Afterwards "
        "scaler.update(2.0**16) sets the scale at once; else it doubles every 2000 steps "
        "[python -m apex_mp explain the-loss-scale-sinks]"
    ]
    assert scaler.get_scale() == 1.0
    before = param.detach().clone()
    run(scaler, optimizer, [1e-3] * 5, device)
    assert (param < before - 0.3).all()


def test_bounds_come_before_the_lowest_of_16_bit_gradients(device: torch.device) -> None:
    for options, expected in (({"min_scale": 2.0**-9}, 2.0**-9), ({"max_scale": 2.0**-3}, 2.0**-3)):
        param = Parameter(torch.ones(1000, device=device, dtype=F16))
        scaler = GradScaler(device.type, init_scale=2.0**-2, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(scaler, FusedAdam([param], master_weights=True), [math.nan] * 20, device)
        assert scaler.get_scale() == expected


# --- torch's fused optimizers: a first step that is skipped leaves nothing.


def fused_of_torch() -> dict[str, Any]:
    found = {}
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and "fused" in inspect.signature(kind.__init__).parameters:
            found[name] = functools.partial(kind, lr=0.1)
            if "momentum" in inspect.signature(kind.__init__).parameters:
                found[f"{name} dampened"] = functools.partial(
                    kind, lr=0.1, momentum=0.9, dampening=0.5
                )
                found[f"{name} nesterov"] = functools.partial(
                    kind, lr=0.1, momentum=0.9, nesterov=True
                )
    return found


FUSED_OF_TORCH = fused_of_torch()


@pytest.mark.parametrize("make", FUSED_OF_TORCH.values(), ids=[*FUSED_OF_TORCH])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_a_skipped_first_step_leaves_nothing(
    make: Any, unscale: bool, device: torch.device
) -> None:
    results = []
    for factors in ([math.inf, math.nan, 1.0, 2.0], [1.0, 2.0]):
        param = Parameter(torch.ones(1000, device=device, dtype=F32))
        optimizer, scaler = make([param], fused=True), GradScaler(device.type)
        if unscale:
            plain = scaler.step
            scaler.step = lambda each, scaler=scaler, plain=plain: (
                scaler.unscale_(each),
                plain(each),
            )
        run(scaler, optimizer, factors, device)
        results.append(param.detach())
    assert_same_bits(*results)
    assert {"Adam", "AdamW", "SGD", "SGD dampened", "Adagrad"} <= {*FUSED_OF_TORCH}


@pytest.mark.parametrize("make", FUSED_OF_TORCH.values(), ids=[*FUSED_OF_TORCH])
def test_a_parameter_whose_first_step_is_skipped_later_keeps_nothing(
    make: Any, device: torch.device
) -> None:
    results = []
    for factors in ([math.inf, 1.0], [1.0]):
        early, late = (Parameter(torch.ones(1000, device=device)) for _ in range(2))
        optimizer, scaler = make([early, late], fused=True), GradScaler(device.type)
        for loss in (early.sum(), *((late * factor).sum() for factor in factors)):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            del_me = [torch.full((1000,), math.nan, device=device) for _ in range(50)]
            del del_me  # Memory that was used before.
            scaler.step(optimizer)
            scaler.update()
        results.append(late.detach())
    assert_same_bits(*results)


@pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("lowest", [None, 0.25])
@pytest.mark.usefixtures("amp_off")
def test_the_scale_of_scale_loss_stops_at_1_where_the_model_has_16_bits(
    lowest: float | None, level: str
) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale="dynamic",
        min_loss_scale=lowest,
        verbosity=0,
        device_type="cpu",
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0
    for _ in range(4):
        loss = model(torch.ones(2, 4)).float().mean() * math.nan
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    expected = lowest or (0.125 if level == "O1" else 1.0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == expected


@pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf")
@pytest.mark.usefixtures("amp_off")
def test_so_does_that_of_a_handle_once_gradients_have_16_bits() -> None:
    handle = amp.init()
    for dtype, expected in ((F32, 0.125), (F16, 1.0), (F32, 1.0)):
        weight = Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        handle._default_scaler._loss_scale = 2.0
        for _ in range(4):
            with handle.scale_loss(weight.float().sum() * math.nan, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert handle._default_scaler.loss_scale() == expected
