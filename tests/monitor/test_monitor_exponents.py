"""Samples of gradient exponents: what they count, what they predict, and what steps lose."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, PROBES, parameter, pull, wrap
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.core import ops
from apex_mp.monitor import Exponents, Monitor, Sample, lost_updates
from apex_mp.monitor.exponents import Sampler
from apex_mp.optimizers import FusedAdam, FusedSGD
from apex_mp.scale import device_scale

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


both_paths = pytest.mark.parametrize("device_path", [False, True], ids=["host", "device"])


@pytest.fixture
def paths(device_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_path:
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})


def exponents(counts: dict[int, int], zeros: int = 0) -> Exponents:
    total = sum(counts.values()) + zeros
    return Exponents("weight", (total,), "float16", counts, zeros, 0)


# What a sample says.


def test_a_sample_says_what_float16_makes_of_the_gradients() -> None:
    grad = exponents({-20: 3, -15: 1, -14: 2, 3: 4}, zeros=5)
    assert (grad.smallest, grad.largest, grad.total) == (-20, 3, 15)
    assert (grad.underflows, grad.below(-19)) == (4, 3)
    sample = Sample(7, 2.0**10, (grad, exponents({-16: 4})))
    assert (sample.total, sample.zeros, sample.underflows) == (19, 5, 8)
    assert sample.saved(2.0**10) == 0.0
    assert sample.saved(2.0**11) == 1 / 8
    assert sample.saved(2.0**12) == 5 / 8
    assert sample.saved(2.0**16) == 1.0
    assert sample.saved(2.0**8) == 0.0
    assert sample.largest_scale == 2.0**22


# Sampling.


class Holder(nn.Module):
    def __init__(self, **params: Tensor) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)  # type: ignore[arg-type]


@both_paths
@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())
def test_gradients_of_an_fp16_optimizer_are_counted_scaled(probe: Any) -> None:
    half, full = parameter([1.0] * 4), parameter([1.0] * 2, F32)
    model = Holder(low=half, wide=full)
    optimizer = wrap(
        probe([half, full]), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}
    )
    monitor = Monitor(optimizer, model=model, every=2)
    for _ in range(4):
        optimizer.zero_grad()
        grads = torch.tensor([2.0, 2.0**-20, 0.0, -3.0])
        optimizer.backward(pull((half, grads), (full, torch.tensor([2.0**-30, 1.0]))))
        optimizer.step()
    history = monitor.history
    assert [(sample.step, sample.scale) for sample in history.samples] == [(2, 8.0), (4, 8.0)]
    # What backward has made, whether or not it has been unscaled since.
    assert history.samples[0].grads == (
        Exponents("low", (4,), "float16", {-17: 1, 4: 2}, 1, 0),
        Exponents("wide", (2,), "float32", {-27: 1, 3: 1}, 0, 0),
    )


@both_paths
@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_gradients_of_amp_are_counted_scaled(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer: Any = FusedAdam(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=2.0**10, verbosity=0
    )
    monitor = Monitor(optimizer, model=model, every=1)
    x = torch.randn(4, 3)
    seen: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
    # At O3 float16 gradients are unscaled in place, where small ones are lost.
    factor = 1e-2 if level == "O3" else 1e-6
    with amp.scale_loss(model(x).float().square().sum() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    (sample,) = monitor.history.samples
    assert [grad.name for grad in sample.grads] == ["weight", "bias"]
    for grad in sample.grads:
        counts = torch.zeros(1, 256, dtype=torch.int64)
        ops.exponents_([seen[grad.name]], counts)
        expected = {b - 127: n for b, n in enumerate(counts[0].tolist()) if n and 0 < b < 255}
        assert grad.counts == expected


@both_paths
@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_of_a_grad_scaler_are_counted_scaled(unscales: bool) -> None:
    weight = parameter([1.0] * 3, F32)
    optimizer, scaler = FusedAdam([weight]), amp.GradScaler("cpu", init_scale=8.0)
    monitor = Monitor(scaler, model=Holder(weight=weight), every=1)
    scaler.scale(pull((weight, torch.tensor([2.0, 2.0**-20, 0.0])))).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    (sample,) = monitor.history.samples
    assert sample.scale == 8.0
    assert sample.grads == (Exponents("weight", (3,), "float32", {-17: 1, 4: 1}, 1, 0),)


def watched_run() -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).half()
    optimizer = wrap(FusedAdam(model.parameters()), static_loss_scale=2.0**-6)
    monitor = Monitor(optimizer, model=model, every=2)
    x = torch.randn(16, 8).half()
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
    return monitor


def test_the_report_has_a_table_of_the_last_sample() -> None:
    monitor = watched_run()
    lines = monitor.report().splitlines()
    start = lines.index("gradients of step 4, as backward left them at a loss scale of 2^-6:")
    sample = monitor.history.samples[-1]
    assert lines[start + 1] == (
        f"  {100 * sample.zeros / sample.total:.1f} % zero, "
        f"{100 * sample.underflows / sample.total:.1f} % below 2^-14, where float16 loses digits"
    )
    assert lines[start + 2].startswith("  a loss scale of 2^")
    assert "would save 100.0 % of those; at more the largest becomes inf" in lines[start + 2]
    assert lines[start + 3].split() == [
        "parameter",
        "smallest",
        "largest",
        "zero",
        "below",
        "2^-14",
    ]
    assert {line.split()[0] for line in lines[start + 4 :]} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }


# A part of large gradients.


def sampled(grads: dict[str, Tensor], scale: float = 1.0) -> Sample:
    sampler = Sampler(grads.items(), unscaled=())
    sampler.run()
    return sampler.sample(1, scale)


@pytest.mark.parametrize("width", [96, 100, 768, 1023, 4096])
def test_no_row_or_column_is_left_out(width: int) -> None:
    """A sixteenth of the columns, or of the rows, are another power of two: their share is seen."""
    grad = torch.ones((1 << 20) // width, width)
    for which in (grad[:, width // 2 : width // 2 + width // 16], grad[5::16]):
        which.fill_(2.0**-20)
        share = int((grad != 1.0).sum()) / grad.numel()
        assert sampled({"weight": grad}).underflows / grad.numel() == pytest.approx(share, abs=0.01)
        grad.fill_(1.0)


@pytest.mark.parametrize("power", [1, 2, 4])
def test_a_part_predicts_what_a_larger_scale_saves(power: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(768, 768), (768, 3072), (3072,), (5000, 768)]
    true = [
        torch.randn(shape, generator=generator) * torch.exp2(-8 - 8 * torch.rand(shape[-1:]))
        for shape in shapes
    ]
    now = {str(i): grad.half() for i, grad in enumerate(true)}
    then = [(grad * 2.0**power).half() for grad in true]
    sample = sampled(now)
    assert sample.looked_at < sample.total / 20
    low = [(grad != 0) & (grad.abs() < 2.0**-14) for grad in now.values()]
    saved = sum(
        int((each & (grad.abs() >= 2.0**-14)).sum()) for each, grad in zip(low, then, strict=True)
    )
    wanted = 100 * saved / sum(int(each.sum()) for each in low)
    assert wanted > 10
    assert 100 * sample.saved(2.0**power) == pytest.approx(wanted, abs=1.0)


# The prediction, against a run at the other scale.


def gradients(scale: float, dtype: torch.dtype) -> tuple[Monitor, list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).to(dtype)
    x = torch.randn(128, 64).to(dtype)
    optimizer = wrap(FusedAdam(model.parameters()), static_loss_scale=scale)
    monitor = Monitor(optimizer, model=model, every=1)
    optimizer.backward(model(x).float().square().mean() * 2e-3)
    found = [param.grad.clone() * (1.0 if dtype is F16 else scale) for param in model.parameters()]  # type: ignore[union-attr]
    optimizer.step()
    return monitor, found


@pytest.mark.parametrize("power", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("dtype", [F16, F32], ids=["fp16", "fp32"])
def test_a_larger_scale_saves_what_was_predicted(power: int, dtype: torch.dtype) -> None:
    scale = 2.0**6
    monitor, now = gradients(scale, dtype)
    (sample,) = monitor.history.samples
    _, then = gradients(scale * 2.0**power, dtype)
    counted = underflowing = saved = 0
    for one, other in zip(now, then, strict=True):
        underflows = (one != 0) & (one.double().abs() < 2.0**-14)
        counted += one.numel()
        underflowing += int(underflows.sum())
        saved += int((underflows & (other.double().abs() >= 2.0**-14)).sum())
    assert sample.underflows == underflowing > counted / 10
    assert 100 * sample.saved(scale * 2.0**power) == pytest.approx(
        100 * saved / underflowing, abs=1.0
    )


def expected(optimizer: Any, params: list[Tensor], scale: float) -> list[tuple[int, int]]:
    """Count with an optimizer of torch, or ours, made anew in float64."""
    wide = [nn.Parameter(param.detach().double()) for param in params]
    for one, param in zip(wide, params, strict=True):
        one.grad = param.grad.double() / scale  # type: ignore[union-attr]
    before = [param.detach().clone() for param in wide]
    optimizer(wide).step()
    counts = []
    for old, new, param in zip(before, wide, params, strict=True):
        moves = new != old
        counts.append((int((moves & (new.to(param.dtype) == param)).sum()), int(moves.sum())))
    return counts


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize(
    "made",
    [
        lambda params: torch.optim.SGD(params, lr=1e-3),
        lambda params: torch.optim.AdamW(params, lr=1e-4),
        lambda params: FusedAdam(params, lr=1e-4),
        lambda params: FusedSGD(params, lr=1e-3, momentum=0.9),
    ],
    ids=["SGD", "AdamW", "FusedAdam", "FusedSGD"],
)
def test_lost_updates_are_those_of_a_count_in_float64(
    made: Any, scale: float, dtype: torch.dtype
) -> None:
    params = [nn.Parameter(torch.randn(32, 16).to(dtype)), nn.Parameter(torch.randn(7).to(dtype))]
    for param in params:
        param.grad = (torch.randn(param.shape) * scale).to(dtype)
        param.grad.flatten()[0] = 0.0
    optimizer = made(params)
    saved = copy.deepcopy((params, optimizer.state_dict()))
    found = lost_updates(optimizer, scale=scale)
    assert [(each.lost, each.updates) for each in found] == expected(made, params, scale)
    assert [each.total for each in found] == [32 * 16, 7]
    assert [each.name for each in found] == ["group 0, parameter 0", "group 0, parameter 1"]
    assert 0 < found[0].lost < found[0].updates
    for param, before in zip(params, saved[0], strict=True):
        assert torch.equal(param, before)
    assert optimizer.state_dict()["state"] == saved[1]["state"]


def test_parameters_with_masters_and_of_32_bits_lose_nothing() -> None:
    model = nn.ModuleDict({"low": nn.Linear(2, 2).half(), "wide": nn.Linear(2, 2)})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert lost_updates(FusedAdam(model.parameters(), master_weights=True)) == []
    names = [each.name for each in lost_updates(FusedAdam(model.parameters()), model=model)]
    assert names == ["low.weight", "low.bias"]
    assert lost_updates(wrap(FusedAdam(model.parameters()))) == []


def test_a_sample_of_zeros_predicts_nothing() -> None:
    sample = Sample(1, 8.0, (exponents({}, zeros=4),))
    assert sample.largest_scale is None
    assert sample.saved(16.0) == 0.0
    assert (sample.grads[0].smallest, sample.grads[0].largest) == (None, None)
