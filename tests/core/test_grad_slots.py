"""GradSlots: the gradients of an optimizer's parameters, read in one walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.core.grad_slots import GradSlots

F16, F32 = torch.float16, torch.float32


class Lazy(Parameter):
    """A parameter that makes its gradient when it is asked for it."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return torch.full_like(self, 7.0, requires_grad=False)


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
    assert [*map(id, grads.params())] == [id(params[row]) for row in rows]
    assert slots.counts(rows) == [1, 0, 2]
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
    assert (here.rows, len(here), here.has_double) == ([1, 3], 2, False)
    assert grads.others == [0, 2, 4]
    assert [*map(id, grads.other_params())] == [id(params[row]) for row in (0, 2, 4)]


def test_a_gradient_on_a_device_without_kernels_is_left_to_others() -> None:
    param = Parameter(torch.zeros(3, device="meta"))
    param.grad = torch.zeros(3, device="meta")
    grads = GradSlots([{"params": [param]}]).read()
    assert (grads.plain, grads.others) == ({}, [0])


def test_a_parameter_of_a_class_of_its_own_is_asked_at_its_place(device: torch.device) -> None:
    params = make(device, torch.ones(2, 3), torch.ones(2, 3))
    params.insert(1, Lazy(torch.zeros(2, 3, device=device)))
    grads = GradSlots([{"params": params}]).read()
    (here,) = grads.plain.values()
    rows, tensors = here.rows, here.grads
    assert rows == [0, 1, 2]
    assert [tensor[0, 0].item() for tensor in tensors] == [1.0, 7.0, 1.0]
    assert _C.read_grads(params)[1] == [1]


@pytest.mark.cpu_only
def test_without_parameters_there_is_nothing() -> None:
    slots = GradSlots([])
    grads = slots.read()
    assert (grads.plain, grads.others, slots.counts([])) == ({}, [], [])


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
    assert slots.read().params()[0] is model


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
