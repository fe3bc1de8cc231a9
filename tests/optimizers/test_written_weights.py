"""Weights that are written under masters: a master that does not round to its weight is it."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import BF16, F16, F32, grad_for, make_params
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp.masters.joined import differ, joined
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

OPTIMIZERS: list[Any] = [FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD]
SHAPES = ((5,), (40, 30))

each_half = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])


def params_of(optimizer: Any) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer: Any, number: int, lr: float | None = None) -> None:
    """Take a step; with `lr=0` only masters and weights meet."""
    before = [group["lr"] for group in optimizer.param_groups]
    for index, param in enumerate(params_of(optimizer)):
        param.grad = grad_for(param, number, index).to(param.dtype)
    for group, usual in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = usual if lr is None else lr
    optimizer.step()
    for group, usual in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = usual


def trained(
    dtype: torch.dtype,
    device: torch.device,
    kind: Any = FusedAdam,
    masters: bool | str = True,
    steps: int = 3,
) -> Any:
    """Return an optimizer whose masters have digits that their weights lack."""
    optimizer = kind(make_params(device, dtype, SHAPES), lr=1e-3, master_weights=masters)
    for number in range(steps):
        step(optimizer, number)
    return optimizer


# --- Every way to write.


def replace_data(params: list[Parameter]) -> None:
    for param in params:
        param.data = param.detach() * 0.5


def write_a_vector(params: list[Parameter]) -> None:
    vector = torch.nn.utils.parameters_to_vector(params)
    torch.nn.utils.vector_to_parameters(vector * 0.5, params)


def load(params: list[Parameter]) -> None:
    model = torch.nn.ParameterList(params)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def clamp(params: list[Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.clamp_(-0.5, 0.5)


def mask(params: list[Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.view(-1)[1::2] = 0.0


def average(params: list[Parameter]) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(params, [torch.ones_like(param) for param in params], 0.5)


def copy_by_data(params: list[Parameter]) -> None:
    for param in params:
        param.data.copy_(param.data * 0.5)


WRITES: dict[str, Callable[[list[Parameter]], None]] = {
    write.__name__: write
    for write in (replace_data, write_a_vector, load, clamp, mask, average, copy_by_data)
}


each_kind = pytest.mark.parametrize("masters", ["float32", True], ids=["whole", "split"])


@each_half
@each_kind
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_written_weights(
    kind: Any, write: str, masters: bool | str, dtype: torch.dtype, device: torch.device
) -> None:
    optimizer = trained(dtype, device, kind, masters)
    params = params_of(optimizer)
    before = [(param.detach().clone(), optimizer.master(param)) for param in params]
    WRITES[write](params)
    written = [param.detach().clone() for param in params]
    for _ in range(2):
        for param, weight, (old, master) in zip(params, written, before, strict=True):
            now = optimizer.master(param)
            same = weight.view(torch.int16) == old.view(torch.int16)
            assert_same_bits(now[same], master[same])
            if masters == "float32":
                assert_same_bits(now[~same], weight[~same].float())
            assert not differ(now, weight).any()
            assert_same_bits(param.detach(), weight)
        step(optimizer, 3, lr=0.0)


@each_half
@each_kind
@pytest.mark.parametrize("every", [1, 5, 6])
def test_a_clamp_by_data_counts_in_whichever_step(
    every: int, masters: bool | str, dtype: torch.dtype, device: torch.device
) -> None:
    """As in a WGAN, or by Lookahead: neither version nor address changes."""
    (param,) = make_params(device, dtype, ((64,),))
    optimizer = FusedSGD([param], lr=0.125, master_weights=masters)
    expected = param.detach().double()
    for number in range(1, 25):
        grad = grad_for(param, number, 0).to(dtype)
        param.grad = grad.clone()
        optimizer.step()
        expected -= 0.125 * grad.double()
        if number % every == 0:
            param.data.clamp_(-0.25, 0.25)
            expected.clamp_(-0.25, 0.25)
        # A weight that is written to itself leaves the digits; a clamp cuts those beyond it.
        bound = number * torch.finfo(dtype).eps
        torch.testing.assert_close(optimizer.master(param).double(), expected, rtol=0, atol=bound)


def test_no_step_warns_of_writes(device: torch.device) -> None:
    optimizer = trained(F16, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3, 8):
            clamp(params_of(optimizer))
            step(optimizer, number)


@each_half
def test_digits_of_masters_stay_where_nothing_was_written(
    dtype: torch.dtype, device: torch.device
) -> None:
    optimizer, twin = trained(dtype, device), trained(dtype, device)
    with torch.no_grad():
        params_of(optimizer)[1][3] = 7.0
    step(optimizer, 3)
    step(twin, 3)
    (first, second), (same, other) = params_of(optimizer), params_of(twin)
    assert_same_bits(optimizer.master(first), twin.master(same))
    rest = torch.arange(40, device=device) != 3
    assert_same_bits(optimizer.master(second)[rest], twin.master(other)[rest])
    assert ((optimizer.master(second)[3] - 7.0).abs() <= 2.0**-6 + 1e-3).all()  # Half a bfloat16.


@each_half
@pytest.mark.parametrize("masters", ["float32", True], ids=["whole", "split"])
def test_weights_that_are_swapped_in_and_back_stay_exact(
    masters: bool | str, dtype: torch.dtype, device: torch.device
) -> None:
    optimizer, twin = (trained(dtype, device, masters=masters) for _ in range(2))
    for number in range(3, 6):
        kept = [param.detach().clone() for param in params_of(optimizer)]
        with torch.no_grad():
            for param in params_of(optimizer):
                param.zero_()
            for param, value in zip(params_of(optimizer), kept, strict=True):
                param.copy_(value)
        step(optimizer, number)
        step(twin, number)
    for param, other in zip(params_of(optimizer), params_of(twin), strict=True):
        assert_same_bits(optimizer.master(param), twin.master(other))


def test_weights_that_were_nan_are_replaced(device: torch.device) -> None:
    optimizer = trained(F16, device, masters="float32")
    best = [param.detach().clone() for param in params_of(optimizer)]
    with torch.no_grad():
        for param in params_of(optimizer):
            optimizer._own_masters.kept[param].fill_(torch.nan)
            param.fill_(torch.nan)
    step(optimizer, 3)
    with torch.no_grad():
        for param, value in zip(params_of(optimizer), best, strict=True):
            param.copy_(value)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][name].zero_()
    step(optimizer, 4, lr=0.0)
    for param, value in zip(params_of(optimizer), best, strict=True):
        assert_same_bits(param.detach(), value)


def test_a_master_that_is_written_alone_is_the_weight(device: torch.device) -> None:
    optimizer = trained(F16, device, masters="float32")
    param = params_of(optimizer)[0]
    before = param.detach().clone()
    optimizer._own_masters.kept[param].fill_(2.0)
    step(optimizer, 3, lr=0.0)
    assert_same_bits(param.detach(), before)
    assert_same_bits(optimizer.master(param), before.float())


EDGES = [0.0, -0.0, 6e-8, -7.5e-6, 2.0**-16, 3e-5, 2.0**-15, 2.0**-14, 0.1, -1.0, 65504.0, math.inf]


@each_half
def test_any_remainder_beside_a_weight_is_a_master_that_rounds_to_it(
    dtype: torch.dtype, device: torch.device
) -> None:
    remainders = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    for edge in EDGES:
        weights = torch.full((2**16,), edge, device=device).to(dtype)
        masters = joined(weights, remainders)
        rounded = masters.to(dtype)
        to_weight, to_rounded = (
            (masters.double() - each.double()).abs() for each in (weights, rounded)
        )
        is_tie = (to_weight == to_rounded) | ((rounded.isinf()) & (masters.abs() == 65520.0))
        assert ((rounded == weights) | is_tie).all(), edge
        assert (rounded.signbit() == weights.signbit()).all()
        assert not (differ(masters, weights) & ~is_tie).any()


# --- Saved and loaded, in any order.


def test_loaded_weights_are_those_of_the_model_file(device: torch.device) -> None:
    optimizer = trained(F16, device)
    saved = optimizer.state_dict()
    for masters in ("float32", True):
        resumed = FusedAdam(make_params(device, F16, SHAPES), lr=1e-3, master_weights=masters)
        best = [param.detach().clone() for param in params_of(resumed)]
        resumed.load_state_dict(saved)
        step(resumed, 3, lr=0.0)
        for param, value in zip(params_of(resumed), best, strict=True):
            assert_same_bits(param.detach(), value)


@pytest.mark.parametrize("source", ["float32", True], ids=["whole", "split"])
@pytest.mark.parametrize("target", ["float32", True], ids=["whole", "split"])
@each_half
def test_a_resumed_run_keeps_every_digit(
    dtype: torch.dtype, target: bool | str, source: bool | str, device: torch.device
) -> None:
    optimizer = trained(dtype, device, masters=source, steps=30)
    resumed = FusedAdam(make_params(device, dtype, SHAPES), lr=1e-3, master_weights=target)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    with torch.no_grad():
        for param, value in zip(params_of(resumed), params_of(optimizer), strict=True):
            param.copy_(value)
    masters = [optimizer.master(param) for param in params_of(optimizer)]
    step(resumed, 30, lr=0.0)
    for param, master in zip(params_of(resumed), masters, strict=True):
        assert_same_bits(resumed.master(param), master)


def test_both_neighbors_of_a_tie_are_its_weight() -> None:
    """Conversion rounds a tie to even, a split master's weight to the larger one."""
    ties = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(F32)
    for sign in (1.0, -1.0):
        for bits, expected in (
            (0x3F80, [False, True]),
            (0x3F81, [False, False]),
            (0x3F82, [True, False]),
        ):
            weights = torch.full((2,), bits, dtype=torch.int16).view(BF16)
            assert differ(sign * ties, sign * weights).tolist() == expected
        small = sign * torch.tensor([4.5, 5.5, 6.5]) * 2.0**-24
        for steps in ([4, 6, 6], [5, 6, 7]):
            weights = sign * (torch.tensor(steps) * 2.0**-24).half()
            assert not differ(small, weights).any()
        assert differ(small, sign * (torch.tensor([3, 7, 5]) * 2.0**-24).half()).all()


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("remainder", [-4096, -4095, -1, 1, 4095, 4096])
def test_any_float16_keeps_its_value_beside_any_remainder(remainder: int) -> None:
    """A remainder of half a step is that of an even weight: beside an odd one it does not count."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(F16)
    weights = weights[weights.isfinite() & (weights.abs() > 2.0**-14)]
    master = joined(weights, torch.full_like(weights, remainder, dtype=torch.int16))
    assert_same_bits(master.half(), weights)
    is_odd = weights.view(torch.int16) & 1 == 1
    is_weight = master == weights.float()
    assert_same_bits(is_weight, is_odd if abs(remainder) == 4096 else torch.zeros_like(is_odd))


def test_a_copied_optimizer_goes_on(device: torch.device) -> None:
    optimizer = trained(BF16, device)
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        step(each, 3)
    for param, other in zip(params_of(optimizer), params_of(twin), strict=True):
        assert_same_bits(optimizer.master(param), twin.master(other))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_that_a_constructor_asks_for_stay(kind: Any, device: torch.device) -> None:
    """The file of a run in float32 has no masters, and FusedAdam's says so."""
    optimizer = kind(make_params(device, F32, SHAPES), lr=1e-3)
    step(optimizer, 0)
    halves = [Parameter(param.detach().half()) for param in params_of(optimizer)]
    resumed = kind(halves, lr=1e-3, master_weights=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["master_weights"] is True
    step(resumed, 1, lr=0.0)
    for param in params_of(resumed):
        assert param in resumed._own_masters.kept
        assert_same_bits(resumed.master(param), param.detach().float())


# --- Masters that come back.


def cast(optimizer: Any, dtype: torch.dtype) -> None:
    """Do what `Module.to` does to parameters."""
    for param in params_of(optimizer):
        param.data = param.data.to(dtype)
        param.grad = None


@pytest.mark.parametrize("masters", ["float32", True], ids=["whole", "split"])
def test_a_float32_phase_leaves_no_master(masters: bool | str, device: torch.device) -> None:
    optimizer = trained(F16, device, masters=masters)
    cast(optimizer, F32)
    for param in params_of(optimizer):
        assert_same_bits(optimizer.master(param), param.detach())
    for number in range(3, 10):
        step(optimizer, number)
    assert not optimizer._own_masters.kept
    cast(optimizer, F16)
    expected = [param.detach().float() for param in params_of(optimizer)]
    step(optimizer, 10, lr=0.0)
    for param, master in zip(params_of(optimizer), expected, strict=True):
        assert_same_bits(optimizer.master(param), master)


@pytest.mark.parametrize("masters", ["float32", True], ids=["whole", "split"])
def test_a_phase_without_masters_leaves_none(masters: bool | str, device: torch.device) -> None:
    optimizer = trained(F16, device, masters=masters)
    optimizer.param_groups[0]["master_weights"] = False
    for number in range(3, 10):
        step(optimizer, number)
    optimizer.param_groups[0]["master_weights"] = masters
    expected = [param.detach().float() for param in params_of(optimizer)]
    step(optimizer, 10, lr=0.0)
    for param, master in zip(params_of(optimizer), expected, strict=True):
        assert_same_bits(optimizer.master(param), master)


@each_half
@each_kind
def test_a_cast_to_the_other_half_writes_weights(
    masters: bool | str, dtype: torch.dtype, device: torch.device
) -> None:
    optimizer = trained(dtype, device, masters=masters)
    cast(optimizer, BF16 if dtype == F16 else F16)
    weights = [param.detach().clone() for param in params_of(optimizer)]
    step(optimizer, 3, lr=0.0)
    for param, weight in zip(params_of(optimizer), weights, strict=True):
        assert_same_bits(param.detach(), weight)
        assert not differ(optimizer.master(param), weight).any()
