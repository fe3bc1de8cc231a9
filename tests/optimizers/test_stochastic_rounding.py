"""Moments that are rounded to bfloat16 at random: right on average, and repeatable."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from fused_adam_cases import NAMES, copies_of, give_grads, grad_for
from rule_cases import copy_master, make_params
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]).double())[0, 1].item()


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNT = 1 << 20

Adam = functools.partial(FusedAdam, moment_dtype=BF16, stochastic_rounding=True)
MAKERS: dict[str, Any] = {
    "Adam": functools.partial(Adam, lr=0.01, weight_decay=0.1),
    "LAMB": FusedLAMB,
    "NovoGrad": FusedNovoGrad,
}


def one_step(param: Tensor, grads: float | Tensor, optimizer: Any) -> dict[str, Tensor]:
    param.grad = torch.zeros_like(param) + grads
    optimizer.step()
    return {name: optimizer.state[param][name].float() for name in MOMENTS}


def went_up(value: Tensor, exact: float) -> Tensor:
    """Where a number was rounded to its upper neighbour; it must be one of the two."""
    low = torch.tensor(exact).view(torch.int32) & ~0xFFFF
    low, high = (low + step for step in (0, 0x10000))
    bits = value.view(torch.int32)
    assert ((bits == low) | (bits == high)).all()
    return bits == high


def part_of_the_way(exact: float) -> float:
    return (torch.tensor(exact).view(torch.int32).item() & 0xFFFF) / 0x10000  # type: ignore[operator]


@pytest.mark.usefixtures("cpu_level")
def test_as_many_are_rounded_up_as_a_number_is_on_its_way(device: torch.device) -> None:
    ones = Parameter(torch.ones(COUNT, device=device))
    for grad in (1.0, 1.0013, 2.34567):
        optimizer = Adam([ones])
        for name, exact in zip(MOMENTS, (0.1 * grad, 0.001 * grad * grad), strict=True):
            optimizer.state.clear()
            part = part_of_the_way(exact)
            up = went_up(one_step(ones, grad, optimizer)[name], exact).double().mean().item()
            deviation = (part * (1 - part) / COUNT) ** 0.5
            assert abs(up - part) < 5 * deviation + 2e-4, (name, up, part)


def in_memory(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,))


def hashed(count: int, position: int, step: int) -> Tensor:
    """The random bits of csrc/math/rounding.h, in whole numbers of 64 bits."""

    def mix(numbers: Tensor, first: int, second: int) -> Tensor:
        wrap = 0xFFFFFFFF
        numbers = (numbers + first) & wrap
        numbers = numbers ^ (numbers >> 16)
        numbers = (numbers * 0x7FEB352D) & wrap
        numbers = numbers ^ (numbers >> 15)
        numbers = (numbers + second) & wrap
        # What overflows 64 bits is above the lower 32.
        numbers = (numbers * 0x846CA68B) & wrap
        return numbers ^ (numbers >> 16)

    step_bits = torch.tensor([float(step)]).view(torch.int32).to(torch.int64)
    first = mix(step_bits, position, 0)
    second = mix(first, 0, 1)
    return mix(torch.arange(count), int(first), int(second))


def halves(which: int, random: Tensor) -> Tensor:
    return random & 0xFFFF if which == 0 else random >> 16


def rounded(exact: Tensor, random: Tensor) -> Tensor:
    bits = exact.cpu().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ((bits + random) >> 16).to(torch.uint16).view(BF16)


@pytest.mark.parametrize("grad_dtype", [None, F64], ids=["grads alike", "fp64 grads"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=NAMES.get)
@pytest.mark.parametrize("masters", [False, "float32", True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=[*MAKERS])
@pytest.mark.usefixtures("cpu_level")
def test_random_bits_are_those_of_the_hash(
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    masters: Any,
    make: Any,
    device: torch.device,
) -> None:
    params = make_params(device, dtype)
    optimizer = make(params, master_weights=masters)
    for group in optimizer.param_groups:
        group.update(moment_dtype=BF16, stochastic_rounding=True)
    for step in range(3):
        wide_params = copies_of(params)
        wide = make(wide_params, master_weights=masters)
        for group in wide.param_groups:
            group.update(moment_dtype=F32, stochastic_rounding=False)
        for param, twin in zip(params, wide_params, strict=True):
            if param in optimizer.state:
                wide.state[twin] = {
                    name: value.float() if value.dtype == BF16 else value.clone()
                    for name, value in optimizer.state[param].items()
                }
            copy_master(optimizer, param, wide, twin)
        grads = [grad_for(p, step, i, dtype).to(grad_dtype or dtype) for i, p in enumerate(params)]
        optimizer.step(grads=grads)
        wide.step(grads=grads)
        for position, (param, twin) in enumerate(zip(params, wide_params, strict=True)):
            assert_same_bits(optimizer.master(param), wide.master(twin))
            for which, name in enumerate(MOMENTS):
                exact, moment = (each[name] for each in (wide.state[twin], optimizer.state[param]))
                if moment.dtype != BF16:
                    continue  # NovoGrad's second one is a number.
                random = halves(which, hashed(exact.numel(), position, step))
                assert_same_bits(in_memory(moment).cpu(), rounded(in_memory(exact), random))


@pytest.mark.parametrize("masters", ["float32", True])
@pytest.mark.parametrize("offset", [1, 5])
@pytest.mark.usefixtures("cpu_level")
def test_a_parameter_may_begin_anywhere(offset: int, masters: Any, device: torch.device) -> None:
    """Where its copy is not aligned, the first numbers are stepped apart from the others."""
    whole = torch.ones(40_000, dtype=F16, device=device)
    param = Parameter(whole[offset : offset + 33_001])
    twin = Parameter(param.detach().clone())
    moments = one_step(param, 1.25, Adam([param], master_weights=masters))
    exact = one_step(twin, 1.25, FusedAdam([twin], master_weights=masters))
    random = hashed(param.numel(), 0, 0)
    for which, name in enumerate(MOMENTS):
        expected = rounded(exact[name], halves(which, random))
        assert_same_bits(moments[name].cpu(), expected.float())
    assert_same_bits(param.detach(), twin.detach())


def test_it_needs_moments_in_bfloat16_and_a_count_of_steps(device: torch.device) -> None:
    params = make_params(device, F16)
    message = "FusedAdam: stochastic_rounding is True; it must be False unless moment_dtype is"
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedAdam(params, stochastic_rounding=True)
    for make in (functools.partial(FusedSGD, lr=0.1, momentum=0.9), FusedNovoGrad, FusedAdam):
        optimizer = make(params)
        optimizer.param_groups[0]["stochastic_rounding"] = True
        give_grads(params, 0)
        with pytest.raises(ValueError, match="it must be False unless moment_dtype is"):
            optimizer.step()
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    optimizer.param_groups[0].update(stochastic_rounding=True, moment_dtype=BF16)
    with pytest.raises(ValueError, match="must be False, because this optimizer keeps no count"):
        optimizer.step()


def test_no_two_roundings_have_to_do_with_each_other(device: torch.device) -> None:
    params = [Parameter(torch.ones(COUNT, device=device)) for _ in range(2)]
    optimizer = Adam(params, betas=(0.0, 0.0))  # so that each step rounds the same numbers
    grad = 1.25 + 2.0**-8  # half of the way; its square is a quarter of it
    ups = []
    for _ in range(3):
        for param in params:
            moments = one_step(param, grad, optimizer)
            ups.append(went_up(moments["exp_avg"], grad))
            ups.append(went_up(moments["exp_avg_sq"], grad * grad))
            param.grad = None
    for number, one in enumerate(ups):
        assert abs(one.double().mean().item() - (0.25 if number % 2 else 0.5)) < 0.01
        for lag in (1, 2, 8, 64, 4096):
            assert abs(correlation(one[lag:], one[:-lag])) < 5e-3, lag
        for other in ups[number + 1 :]:
            assert abs(correlation(one, other)) < 5e-3
            assert abs(correlation(one[1:], other[:-1])) < 5e-3
