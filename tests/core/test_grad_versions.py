"""GradVersions: which gradients are new, or were written, since they were recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from apex_mp._C import GradVersions


def with_grads(count: int = 4) -> list[Parameter]:
    params = [Parameter(torch.ones(5)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(5)
    return params


def recorded(params: list[Parameter]) -> GradVersions:
    versions = GradVersions()
    versions.record(params)
    return versions


def read(params: list[Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.sum(), param.grad.detach(), param.grad.view(5, 1), param.grad.clone()


def write_the_parameter(params: list[Parameter]) -> None:
    with torch.no_grad():
        params[1].add_(1)


def let_one_go(params: list[Parameter]) -> None:
    params[1].grad = None


def let_all_go(params: list[Parameter]) -> None:
    for param in params:
        param.grad = None


def set_the_same_object(params: list[Parameter]) -> None:
    grad = params[1].grad
    params[1].grad = None
    params[1].grad = grad


HARMLESS: tuple[Callable[[list[Parameter]], object], ...] = (
    lambda params: None,
    read,
    write_the_parameter,
    let_one_go,
    let_all_go,
    set_the_same_object,
    lambda params: params.reverse(),
    lambda params: params.append(params.pop(0)),
    lambda params: params.pop(1),
    lambda params: params.insert(1, Parameter(torch.ones(3))),
    lambda params: params.append(params[0]),
)
HARMLESS_NAMES = (
    "nothing",
    "read",
    "write the parameter",
    "let one go",
    "let all go",
    "set the same object",
    "reverse the list",
    "rotate the list",
    "shorten the list",
    "a parameter without gradient",
    "list one twice",
)


@pytest.mark.parametrize("change", HARMLESS, ids=HARMLESS_NAMES)
def test_gradients_that_nobody_wrote_do_not_differ(
    change: Callable[[list[Parameter]], object],
) -> None:
    params = with_grads()
    versions = recorded(params)
    change(params)
    assert not versions.changed(params)


def grad(params: list[Parameter], index: int) -> torch.Tensor:
    found = params[index].grad
    assert found is not None
    return found


def backward(params: list[Parameter]) -> None:
    params[1].sum().backward()


def backward_after_zero_grad(params: list[Parameter]) -> None:
    let_all_go(params)
    backward(params)


def exchange(params: list[Parameter]) -> None:
    params[0].grad, params[1].grad = params[1].grad, params[0].grad


def set_another(params: list[Parameter]) -> None:
    params[1].grad = torch.ones(5)


def set_an_inference_tensor(params: list[Parameter]) -> None:
    with torch.inference_mode():
        params[1].grad = torch.ones(5)


def set_its_data(params: list[Parameter]) -> None:
    grad(params, 1).data = torch.zeros(5)


def write_through_a_view(params: list[Parameter]) -> None:
    grad(params, 1)[2:].zero_()


def write_through_detach(params: list[Parameter]) -> None:
    grad(params, 1).detach().mul_(2)


def set_a_view_of_it(params: list[Parameter]) -> None:
    params[1].grad = grad(params, 1).view(5)


def append_another(params: list[Parameter]) -> None:
    params.extend(with_grads(1))


def put_another_in_its_place(params: list[Parameter]) -> None:
    params[1:2] = with_grads(1)


def exchange_parameters_in_torch(params: list[Parameter]) -> None:
    one, other = params[0].grad, params[1].grad
    params[0].grad = params[1].grad = None
    torch.utils.swap_tensors(params[0], params[1])
    params[0].grad, params[1].grad = other, one


CAME_IN: tuple[Callable[[list[Parameter]], object], ...] = (
    backward,
    backward_after_zero_grad,
    exchange,
    set_another,
    set_an_inference_tensor,
    set_its_data,
    write_through_a_view,
    write_through_detach,
    set_a_view_of_it,
    append_another,
    put_another_in_its_place,
    exchange_parameters_in_torch,
)


@pytest.mark.parametrize("change", CAME_IN, ids=lambda change: change.__name__)
def test_new_or_written_gradients_differ_until_they_are_recorded(
    change: Callable[[list[Parameter]], object],
) -> None:
    params = with_grads()
    versions = recorded(params)
    change(params)
    assert versions.changed(params)
    versions.record(params)
    assert versions.changed(params) == (change is set_an_inference_tensor)


@pytest.mark.parametrize("index", [0, 2, 39])
def test_a_write_to_any_one_of_many_is_seen_also_in_another_order(index: int) -> None:
    params = with_grads(40)
    versions = recorded(params)
    written = params[index]
    assert written.grad is not None
    written.grad.add_(1)
    assert versions.changed(params)
    assert versions.changed(params[::-1])
    assert not versions.changed([param for param in params if param is not written])


@pytest.mark.parametrize("inference", [False, True])
def test_parameters_without_recorded_gradients_differ_as_soon_as_they_have_one(
    inference: bool,
) -> None:
    param = Parameter(torch.ones(5))
    versions = recorded([param])
    assert not versions.changed([param])
    with torch.inference_mode(inference):
        param.grad = torch.ones(5)
    assert versions.changed([param])


def test_a_new_gradient_at_the_address_of_a_freed_one_differs() -> None:
    memory, reused = bytearray(20), 0
    for _ in range(50):
        param = Parameter(torch.ones(5))
        param.grad = torch.frombuffer(memory, dtype=torch.float32)
        versions = recorded([param])
        address = grad([param], 0)._cdata
        param.grad = None
        param.grad = torch.frombuffer(memory, dtype=torch.float32)
        reused += grad([param], 0)._cdata == address
        assert versions.changed([param])
    assert reused > 0  # else every one of them has got an address of its own


@pytest.mark.parametrize("what", ["param", "grad"])
def test_entries_keep_neither_gradient_nor_parameter_alive(what: str) -> None:
    params = with_grads()
    versions = recorded(params)
    held = [weakref.ref(param if what == "param" else param.grad) for param in params]
    if what == "param":
        params.clear()
    else:
        let_all_go(params)
    gc.collect()
    assert [reference() for reference in held] == [None] * 4
    assert not versions.changed(params)
