"""GradSlots: gradients, read in one walk. FoundInf: inf and NaN in them, by device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from waits import Waits

from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.grad_slots import GradSlots

F16, F32 = torch.float16, torch.float32


def make(device: torch.device, *grads: Any) -> list[Parameter]:
    params = []
    for grad in grads:
        params.append(Parameter(torch.zeros(2, 3, device=device)))
        params[-1].grad = None if grad is None else grad.to(device)
    return params


def test_gradients_are_read_with_the_numbers_of_their_parameters(device: torch.device) -> None:
    params = make(device, torch.ones(2, 3), None, torch.ones(2, 3), torch.ones(2, 3), None)
    params[2].grad = params[0].grad  # shared
    slots = GradSlots([{"params": params[:2]}, {"params": []}, {"params": params[2:]}])
    grads = slots.read()
    (here,) = grads.plain.values()
    rows, tensors = here.rows, here.grads
    assert [*grads.plain] == [params[0].grad.device]  # type: ignore[union-attr]
    assert rows == [0, 2, 3]
    assert all(grad is params[row].grad for row, grad in zip(rows, tensors, strict=True))
    assert grads.others == []


def test_what_the_operators_do_not_read_is_left_to_others(device: torch.device) -> None:
    sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 3))
    with_gaps = torch.ones(2, 6)[:, ::2]
    transposed = torch.ones(3, 2).t()
    params = make(device, sparse, transposed, None, torch.ones(2, 3))
    params[2].grad = (
        with_gaps.to(device) if device.type == "cpu" else torch.ones(2, 6).to(device)[:, ::2]
    )
    negative = torch.complex(torch.zeros(2, 3), torch.ones(2, 3)).to(device).conj().imag
    params.append(Parameter(torch.zeros(2, 3, device=device)))
    params[-1].grad = negative
    grads = GradSlots([{"params": params}]).read()
    (here,) = grads.plain.values()
    assert (here.rows, len(here), here.dtypes) == ([1, 3], 2, [torch.float32])
    assert grads.others == [0, 2, 4]
    assert [*map(id, grads.other_params())] == [id(params[row]) for row in (0, 2, 4)]


@pytest.mark.cpu_only
def test_a_master_steps_with_the_gradient_of_its_model() -> None:
    model, master, own = (Parameter(torch.zeros(2)) for _ in range(3))
    model.grad = torch.ones(2)
    groups = [{"params": [own]}, {"params": [master]}]
    slots = GradSlots(groups, {master: model})
    assert [each is expected for each, expected in zip(slots.sources, (own, model), strict=True)]
    assert slots.models[0] == [None]
    assert slots.models[1][0] is model
    assert slots.with_master == [1]
    assert slots.read().rows() == {1}


@pytest.mark.cpu_only
def test_slots_fit_as_long_as_the_lists_hold_the_same_parameters() -> None:
    params = [Parameter(torch.zeros(2)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    slots = GradSlots(groups)
    assert slots.fits([{"params": params[:2]}, {"params": params[2:]}])
    assert not slots.fits(groups[:1])
    assert not slots.fits([*groups, {"params": []}])
    groups[0]["params"][1] = params[2]  # in place
    assert not slots.fits(groups)


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
        found.check(make_grads(device, bad), [0, 2, 3], 5)
    assert waits.count == 0
    assert bool(found) == (bad is not None)
    if bad is None:
        root = math.sqrt(20.0)
        assert found.norms == [root, 0.0, root, root, 0.0]
        assert found.sums_on(CPU).tolist() == [20.0, 0.0, 20.0, 20.0, 0.0]


@bad_numbers
def test_check_lists_has_norms_of_groups(bad: float | None, device: torch.device) -> None:
    first, *others = make_grads(device, bad)
    lists = [[None, first], [], [*others, None]]
    found = FoundInf()
    found.check_lists(lists)
    norms = found.group_norms(lists)
    assert norms[:2] == [math.sqrt(20.0), 0.0]
    assert math.isfinite(norms[2]) == (bad is None)
    if bad is None:
        assert norms[2] == pytest.approx(math.sqrt(40.0), rel=1e-15)
    assert found.on(CPU).item() == float(bad is not None)


@pytest.mark.cpu_only
@pytest.mark.parametrize("flags", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, 1.0)])
def test_overflows_on_several_devices_are_one_overflow(flags: tuple[float, ...]) -> None:
    devices = [CPU, torch.device("cuda:0"), torch.device("cuda:1")]
    found = FoundInf()
    found.flags = {each: torch.tensor(flag) for each, flag in zip(devices, flags, strict=True)}
    assert found.on(CPU).item() == max(flags)
    joined = found.join(CPU)
    assert joined is found.flags
    assert sum(flag.item() for flag in joined.values()) == max(flags)
    assert bool(found) == bool(max(flags))


def test_what_is_found_adds_up_after_it_was_read(device: torch.device) -> None:
    found = FoundInf()
    found.check(make_grads(device))
    assert not found
    found.check(make_grads(device, math.nan))
    found.check(make_grads(device))
    assert found
    found.add({device: torch.zeros((), device=device)})
    assert found
