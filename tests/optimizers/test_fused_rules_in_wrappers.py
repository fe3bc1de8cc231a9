"""Every fused optimizer in GradScaler, FP16_Optimizer and amp loses nothing to an overflow."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from fp16_cases import FACES, INF, NAN, parameter, pull
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    NAMES,
    OVERFLOWS,
    assert_same_state,
    copies_of,
    give_grads,
    make_scaler,
    scaled_step,
)
from rule_cases import (
    SMALL,
    Subject,
    each_subject,
    make_params,
)
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp import amp, fp16_utils
from apex_mp.optimizers import (
    FusedAdagrad,
    FusedLAMB,
    FusedNovoGrad,
)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).float()


@each_subject
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=NAMES.get)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_grad_scaler_skips_overflows_and_no_other_step(
    bad: float, dtype: torch.dtype, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, dtype, SMALL)
    optimizer = subject.fused(params, **subject.options)
    theirs = copies_of(params)
    expected = subject.fused(theirs, **subject.options)
    scaler = make_scaler(device, dtype)
    scales = []
    for step in range(20):
        overflow = step in OVERFLOWS
        scales.append(scaled_step(scaler, optimizer, params, step, bad=bad if overflow else None))
        if not overflow:
            give_grads(theirs, step, values=BF16)
            expected.step()
    assert_same_state(optimizer, expected)
    assert min(scales) < 2.0**10
    assert scales[4] > scales[0]


@each_subject
def test_a_first_step_that_is_skipped_leaves_zeros(subject: Subject, device: torch.device) -> None:
    params = make_params(device, F32, SMALL)
    optimizer = subject.fused(params, **subject.options)
    scaled_step(make_scaler(device), optimizer, params, 0, bad=math.inf)
    optimizer.state_dict()  # takes away what is not to be saved
    numbers = [value for state in optimizer.state.values() for value in state.values()]
    assert not any(bool(value.count_nonzero()) for value in numbers)


@each_subject
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_fp16_optimizer_loses_nothing_to_an_overflow_or_a_checkpoint(
    face: Any, dynamic: bool, subject: Subject, device: torch.device
) -> None:
    def make() -> Any:
        params = [parameter([1.0, 2.0], F16, device), parameter([[3.0]], F32, device)]
        inner = subject.fused(params, **subject.options)
        args = {"init_scale": 1024.0, "scale_window": 3}
        return face(inner, 128.0, dynamic, args, verbose=False), params

    def run(optimizer: Any, params: list[Parameter], values: tuple[float, ...]) -> None:
        for value in values:
            optimizer.zero_grad()
            optimizer.backward(pull(*((param, value) for param in params)))
            optimizer.step()

    optimizer, params = make()
    masters = copies_of(params, F32)
    alone = subject.fused(masters, **subject.options)
    run(optimizer, params, (INF,) if dynamic else ())
    assert optimizer.overflow is dynamic
    values = (0.5, -1.5, NAN, 2.0, 0.25) if dynamic else (0.5, -1.5, 2.0, 0.25)
    run(optimizer, params, values)
    other, others = make()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for copied, param in zip(others, params, strict=True):
        copied.data.copy_(param.detach())
    for each, its in ((optimizer, params), (other, others)):
        run(each, its, (1.0, -0.75))
    for value in (*(value for value in values if value == value), 1.0, -0.75):
        for master in masters:
            master.grad = torch.full_like(master, value)
        alone.step()
    for each, its in ((optimizer, params), (other, others)):
        assert_same_state(each.optimizer, alone)
        for param, master in zip(its, masters, strict=True):
            assert_same_bits(param.detach(), master.detach().to(param.dtype))


@pytest.mark.usefixtures("amp_off")
@each_subject
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_initialize_trains_as_without_amp_and_loses_nothing_to_an_overflow(
    level: str, subject: Subject, device: torch.device
) -> None:
    torch.manual_seed(0)
    model: Any = Net().to(device)
    masters = copies_of(model.parameters())
    optimizer: Any = subject.fused(model.parameters(), **subject.options)
    alone = subject.fused(masters, **subject.options)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    inputs = torch.randn(5, 4, device=device)
    for step in range(6):
        optimizer.zero_grad()
        overflow = step in (0, 3)
        loss = model(inputs).square().mean() * (INF if overflow else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if not overflow:
            for master, param in zip(masters, amp.master_params(optimizer), strict=True):
                master.grad = param.grad.detach().clone()
            alone.step()
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == overflow
    for master, param in zip(masters, amp.master_params(optimizer), strict=True):
        torch.testing.assert_close(param.detach(), master.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (FusedAdagrad, "sum"),
        (FusedNovoGrad, "exp_avg"),
        (FusedLAMB, "exp_avg_sq"),
        (torch.optim.Adagrad, "sum"),
    ],
    ids=["FusedAdagrad", "FusedNovoGrad", "FusedLAMB", "torch's Adagrad"],
)
def test_fp16_optimizer_names_the_state_of_another_shape(inner: Any, name: str) -> None:
    param = parameter([1.0] * 3, F16)
    optimizer = fp16_utils.FP16_Optimizer(inner([param]), verbose=False)
    optimizer.backward(pull((param, 1.0)))
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["optimizer_state_dict"]["state"][0][name] = torch.ones(2)
    sentence = rf"{name} of parameter 0 in group 0 has shape \[2\], its parameter \[3\]"
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved)
