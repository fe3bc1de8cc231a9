"""FoundInf: inf and NaN, norms, and unscaled gradients, by device."""

from __future__ import annotations

import math

import pytest
import torch
from waits import Waits

from apex_mp.core.found_inf import FoundInf, inverse, norms

F16, F32, F64 = torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")
bad_numbers = pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])


def make_grads(device: torch.device, bad: float | None = None) -> list[torch.Tensor]:
    grads = [torch.full((5,), 2.0, dtype=dtype, device=device) for dtype in (F16, F32, F64)]
    if bad is not None:
        grads[1][3] = bad
    return grads


@bad_numbers
def test_check_sums_the_squares_of_each_row(bad: float | None, device: torch.device) -> None:
    found = FoundInf()
    with Waits() as waits:
        found.check(make_grads(device, bad), [0, 2, 2], 4)
    assert waits.count == 0
    assert bool(found) == (bad is not None)
    if bad is None:
        assert found.norms == [math.sqrt(20.0), 0.0, math.sqrt(40.0), 0.0]
    assert found.on(CPU).item() == float(bad is not None)


def test_without_gradients_nothing_is_found(device: torch.device) -> None:
    found = FoundInf()
    found.check([], [], 2)
    found.unscale([], [], 0.5)
    assert not found
    assert found.norms == [0.0, 0.0]
    assert found.on(device).item() == 0.0
    assert found.join() == {}


@bad_numbers
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("method", ["unscale", "add_unscaled"])
def test_gradients_are_divided_by_the_scale(
    method: str, on_device: bool, bad: float | None, device: torch.device
) -> None:
    scale = torch.tensor(4.0, device=device) if on_device else 4.0
    src, dst = make_grads(device, bad), [grad.float() for grad in make_grads(device)]
    found = FoundInf()
    with Waits() as waits:
        getattr(found, method)(src, dst, inverse(scale))
    assert waits.count == 0
    assert bool(found) == (bad is not None)
    before = 2.0 if method == "add_unscaled" else 0.0
    for scaled, unscaled in zip(src, dst, strict=True):
        expected = before + scaled.float() / 4.0
        torch.testing.assert_close(unscaled, expected, rtol=0, atol=0, equal_nan=True)


def test_what_was_in_the_sum_before_is_not_found(device: torch.device) -> None:
    found = FoundInf()
    found.add_unscaled(make_grads(device), make_grads(device, math.inf), 1.0)
    assert not found


def test_what_is_found_adds_up_after_it_was_read(device: torch.device) -> None:
    found = FoundInf()
    found.check(make_grads(device))
    assert not found
    found.check(make_grads(device, math.nan))
    found.check(make_grads(device))
    assert found
    found.add({device: torch.zeros((), device=device)})
    assert found


@pytest.mark.cpu_only
@pytest.mark.parametrize("flags", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, 1.0)])
def test_overflows_on_several_devices_are_one_overflow(flags: tuple[float, ...]) -> None:
    devices = [CPU, torch.device("cuda:0"), torch.device("cuda:1")]
    found = FoundInf()
    found.flags = {each: torch.tensor(flag) for each, flag in zip(devices, flags, strict=True)}
    assert found.on(CPU).item() == max(flags)
    joined = found.join()
    assert joined is found.flags
    assert sum(flag.item() for flag in joined.values()) == max(flags)
    assert bool(found) == bool(max(flags))


def test_norms_of_tensors_that_are_not_dense(device: torch.device) -> None:
    tensor = torch.arange(12.0, device=device).view(3, 4)
    assert norms([tensor[:, ::2], tensor.t()]) == [
        math.sqrt(0 + 4 + 16 + 36 + 64 + 100),
        math.sqrt(sum(each**2 for each in range(12))),
    ]
