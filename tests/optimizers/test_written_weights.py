"""Weights that are written under masters: training goes on from them, and a warning says so."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fused_adam_cases import BF16, F16, F32, grad_for, make_params
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core.masters.written_weights import differ
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

OPTIMIZERS: list[Any] = [FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD]
SHAPES = ((5,), (40, 30))
MESSAGE = r"changed outside of step\(\)\. Training goes on from the weights as they are"

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


@each_half
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_written_weights(
    kind: Any, write: str, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type != "cpu" and write == "copy_by_data":
        pytest.skip("neither version nor address changes; docs/troubleshooting.md")
    optimizer = trained(dtype, device, kind)
    params = params_of(optimizer)
    masters = [optimizer.master(param) for param in params]
    before = [param.detach().clone() for param in params]
    WRITES[write](params)
    expected = [
        torch.where(param.detach() == old, master, param.detach().float())
        for param, old, master in zip(params, before, masters, strict=True)
    ]
    for param, master in zip(params, expected, strict=True):
        assert_same_bits(optimizer.master(param), master)
    with pytest.warns(RuntimeWarning, match=rf"{optimizer._public_name}: .*{MESSAGE}"):
        step(optimizer, 3, lr=0.0)
    for param, master in zip(params, expected, strict=True):
        assert_same_bits(optimizer.master(param), master)
        assert_same_bits(param.detach(), master.to(dtype))
    WRITES[write](params)
    step(optimizer, 4, lr=0.0)  # without a second warning


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each_half
@pytest.mark.parametrize("start", [0, 6])
def test_a_clamp_by_data_after_each_step_counts(
    start: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As in a WGAN. A write by data reaches no element that the CPU samples, every eighth of 64."""
    kept = torch.arange(64, device=device) % 8 == 0

    def run(clamp: Callable[[Parameter, Tensor], None]) -> Tensor:
        (param,) = make_params(device, dtype, ((64,),))
        optimizer = FusedSGD([param], lr=0.125, master_weights=True)
        for number in range(start + 20):
            param.grad = grad_for(param, number, 0).to(dtype)
            optimizer.step()
            if number >= start:
                clamp(param, torch.where(kept, param, param.clamp(-0.25, 0.25)).detach())
        return optimizer.master(param)

    def by_data(param: Parameter, clamped: Tensor) -> None:
        param.data.copy_(clamped)

    @torch.no_grad()
    def by_a_copy(param: Parameter, clamped: Tensor) -> None:
        param.copy_(clamped)

    # From step 8 on it is found in each step; what was clamped after 6 and 7 only is undone.
    found, expected = run(by_data), run(by_a_copy)
    if start == 0:
        assert_same_bits(found, expected)
    else:
        assert (found - expected).abs().max() < 0.25 < expected.abs().max()
    assert found[~kept].abs().max() <= 0.5


@each_half
def test_digits_of_masters_stay_where_nothing_was_written(
    dtype: torch.dtype, device: torch.device
) -> None:
    optimizer, twin = trained(dtype, device), trained(dtype, device)
    with torch.no_grad():
        params_of(optimizer)[1][3] = 7.0
    with pytest.warns(RuntimeWarning, match=rf"FusedAdam: params\[0\]\[1\] {MESSAGE}"):
        step(optimizer, 3)
    step(twin, 3)
    (first, second), (same, other) = params_of(optimizer), params_of(twin)
    assert_same_bits(optimizer.master(first), twin.master(same))
    rest = torch.arange(40, device=device) != 3
    assert_same_bits(optimizer.master(second)[rest], twin.master(other)[rest])
    assert ((optimizer.master(second)[3] - 7.0).abs() < 1e-2).all()


@each_half
@pytest.mark.parametrize("masters", [True, "split"], ids=["whole", "split"])
def test_weights_that_are_swapped_in_and_back_stay_exact(
    masters: bool | str, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type != "cpu" and masters == "split":
        pytest.skip("nothing can be compared with a remainder; docs/troubleshooting.md")
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
    optimizer = trained(F16, device)
    best = [param.detach().clone() for param in params_of(optimizer)]
    with torch.no_grad():
        for param in params_of(optimizer):
            optimizer.state[param]["master_param"].fill_(torch.nan)
            param.fill_(torch.nan)
    step(optimizer, 3)
    with torch.no_grad():
        for param, value in zip(params_of(optimizer), best, strict=True):
            param.copy_(value)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][name].zero_()
    with pytest.warns(RuntimeWarning, match=MESSAGE):
        step(optimizer, 4, lr=0.0)
    for param, value in zip(params_of(optimizer), best, strict=True):
        assert_same_bits(param.detach(), value)


def test_masters_that_are_written_win(device: torch.device) -> None:
    optimizer = trained(F16, device)
    param = params_of(optimizer)[0]
    optimizer.state[param]["master_param"].fill_(2.0)
    step(optimizer, 3, lr=0.0)
    assert (param == 2.0).all()


# --- Saved and loaded, in any order.


def test_loaded_weights_are_those_of_the_model_file(device: torch.device) -> None:
    optimizer = trained(F16, device)
    saved = optimizer.state_dict()
    for masters in (True, "split"):
        resumed = FusedAdam(make_params(device, F16, SHAPES), lr=1e-3, master_weights=masters)
        best = [param.detach().clone() for param in params_of(resumed)]
        resumed.load_state_dict(saved)
        with pytest.warns(RuntimeWarning, match=MESSAGE) if masters is True else nullcontext():
            step(resumed, 3, lr=0.0)
        for param, value in zip(params_of(resumed), best, strict=True):
            assert_same_bits(param.detach(), value)


@pytest.mark.parametrize("source", [True, "split"], ids=["whole", "split"])
@pytest.mark.parametrize("target", [True, "split"], ids=["whole", "split"])
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
            (0x3F81, [False, True]),
            (0x3F82, [True, False]),
        ):
            weights = torch.full((2,), bits, dtype=torch.int16).view(BF16)
            assert differ(sign * ties, sign * weights).tolist() == expected
            # The same in a model of the other dtype.
            halves = sign * weights.half()
            assert differ(sign * ties, halves, converted=True).any() == any(expected)
        small = sign * torch.tensor([4.5, 5.5, 6.5]) * 2.0**-24
        for steps in ([4, 6, 6], [5, 6, 7]):
            weights = sign * (torch.tensor(steps) * 2.0**-24).half()
            assert not differ(small, weights).any()
        assert differ(small, sign * (torch.tensor([3, 7, 5]) * 2.0**-24).half()).all()


@pytest.mark.parametrize("target", [True, "split"], ids=["whole", "split"])
def test_a_large_bfloat16_run_with_split_masters_resumes_in_float16(
    target: bool | str, device: torch.device
) -> None:
    """Of 65536 masters one is a tie of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator).to(device)
    optimizer = FusedSGD([Parameter(values.bfloat16())], lr=1e-2, master_weights="split")
    params_of(optimizer)[0].grad = values.flip(0).bfloat16()
    optimizer.step()
    masters = optimizer.master(params_of(optimizer)[0])
    half = Parameter(params_of(optimizer)[0].detach().half())
    resumed = FusedSGD([half], lr=1e-2, master_weights=target)
    resumed.load_state_dict(optimizer.state_dict())
    half.grad = torch.zeros_like(half)
    resumed.step()
    assert_same_bits(resumed.master(half), masters)


def test_a_write_counts_where_the_master_was_touched_too(device: torch.device) -> None:
    optimizer = trained(F16, device)
    param = params_of(optimizer)[0]
    with torch.no_grad():
        optimizer.state[param]["master_param"].clamp_(-100.0, 100.0)
        param[0] = 3.0
    with pytest.warns(RuntimeWarning, match=MESSAGE):
        step(optimizer, 3, lr=0.0)
    assert param[0] == 3.0


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
        assert_same_bits(resumed.state[param]["master_param"], param.detach().float())


# --- Masters that come back.


def cast(optimizer: Any, dtype: torch.dtype) -> None:
    """Do what `Module.to` does to parameters."""
    for param in params_of(optimizer):
        param.data = param.data.to(dtype)
        param.grad = None


@pytest.mark.parametrize("masters", [True, "split"], ids=["whole", "split"])
def test_a_float32_phase_leaves_no_master(masters: bool | str, device: torch.device) -> None:
    optimizer = trained(F16, device, masters=masters)
    cast(optimizer, F32)
    for param in params_of(optimizer):
        assert_same_bits(optimizer.master(param), param.detach())
    for number in range(3, 10):
        step(optimizer, number)
    assert all("master_param" not in state for state in optimizer.state.values())
    cast(optimizer, F16)
    expected = [param.detach().float() for param in params_of(optimizer)]
    step(optimizer, 10, lr=0.0)
    for param, master in zip(params_of(optimizer), expected, strict=True):
        assert_same_bits(optimizer.master(param), master)


@pytest.mark.parametrize("masters", [True, "split"], ids=["whole", "split"])
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
def test_a_cast_to_the_other_half_keeps_masters(dtype: torch.dtype, device: torch.device) -> None:
    optimizer = trained(dtype, device)
    masters = [optimizer.master(param) for param in params_of(optimizer)]
    cast(optimizer, BF16 if dtype == F16 else F16)
    step(optimizer, 3, lr=0.0)
    for param, master in zip(params_of(optimizer), masters, strict=True):
        assert_same_bits(optimizer.master(param), master)
