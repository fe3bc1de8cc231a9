"""The step plan after parameters, their memory, their groups or their gradients are replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_adam_cases import BF16, F16, F32, F64
from plan_cases import KINDS, Run, fresh_grad, make_run, parameter, parameter_at
from torch import Tensor
from torch.nn import Parameter

each_kind = pytest.mark.parametrize("kind", KINDS)


def like(param: Tensor) -> Parameter:
    return Parameter(torch.randn_like(param, dtype=F64).to(param.dtype))


# --- Parameters


def put_another_in_its_place(run: Run) -> None:
    run.listed[1] = like(run.listed[1])


def put_another_in_its_place_with_its_state(run: Run) -> None:
    old, run.listed[1] = run.listed[1], like(run.listed[1])
    run.optimizer.state[run.listed[1]] = run.optimizer.state.pop(old)


def put_another_of_another_shape_in_its_place(run: Run) -> None:
    run.listed[1] = parameter(6, 2, 2, dtype=run.listed[1].dtype)


def reverse(run: Run) -> None:
    run.listed.reverse()


def rotate(run: Run) -> None:
    run.listed.append(run.listed.pop(0))


def shorten(run: Run) -> None:
    del run.listed[1]


def shorten_at_the_end(run: Run) -> None:
    run.listed.pop()


def shorten_with_the_state(run: Run) -> None:
    run.optimizer.state.pop(run.listed.pop(1))


def shorten_and_extend(run: Run) -> None:
    run.listed.pop(0)
    run.listed.append(parameter(7))


def extend(run: Run) -> None:
    run.listed.append(parameter(7))


def insert_at_the_front(run: Run) -> None:
    run.listed.insert(0, parameter(7, dtype=F16))


def give_the_group_another_list(run: Run) -> None:
    run.group["params"] = [parameter(3), *reversed(run.listed)]


def move_data(run: Run) -> None:
    for param in run.listed:
        param.data = param.data.clone()


def exchange_data(run: Run) -> None:
    one, other = parameter(9), parameter(9)
    run.listed.extend([one, other])
    run.train(2)
    one.data, other.data = other.data, one.data


def give_data_another_shape_and_drop_the_state(run: Run) -> None:
    run.listed[1].data = run.listed[1].data.new_ones(8, 2)
    del run.optimizer.state[run.listed[1]]


def give_data_and_state_another_shape(run: Run) -> None:
    param = run.listed[1]
    param.grad = None
    param.data = param.data.new_ones(30, 20)
    state = run.optimizer.state[param]
    for key in state.keys() - {"step"}:
        state[key] = torch.ones(30, 20, dtype=state[key].dtype)


def lay_data_otherwise(run: Run) -> None:
    run.listed[1].data = run.listed[1].data.t().contiguous().t()
    run.listed[3].data = run.listed[3].data.contiguous(memory_format=torch.channels_last)


def exchange_in_torch(run: Run) -> None:
    for param in run.listed:
        param.grad = None
    torch.utils.swap_tensors(run.listed[1], like(run.listed[1]))
    torch.utils.swap_tensors(run.listed[5], like(run.listed[5]))


def exchange_two_parameters_in_torch(run: Run) -> None:
    one, other = parameter(9), parameter(9)
    run.listed.extend([one, other])
    run.train(2)
    one.grad = other.grad = None
    torch.utils.swap_tensors(one, other)


# --- Groups


def add_a_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [parameter(7), parameter(2, 2, dtype=F16)], "lr": 1.0})


def add_a_group_in_front(run: Run) -> None:
    add_a_group(run)
    run.optimizer.param_groups.insert(0, run.optimizer.param_groups.pop())


def add_an_empty_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": []})
    run.optimizer.param_groups.reverse()


def remove_a_group(run: Run) -> None:
    add_a_group(run)
    run.train(2)
    del run.optimizer.param_groups[0]


def exchange_groups(run: Run) -> None:
    add_a_group(run)
    run.train(2)
    run.optimizer.param_groups.reverse()


def exchange_the_lists_of_groups(run: Run) -> None:
    add_a_group(run)
    run.train(2)
    one, other = run.optimizer.param_groups[0], run.optimizer.param_groups[-1]
    one["params"], other["params"] = other["params"], one["params"]


def move_a_parameter_to_another_group(run: Run) -> None:
    add_a_group(run)
    run.optimizer.param_groups[-1]["params"].insert(0, run.listed.pop(1))


def empty_the_lists(run: Run) -> None:
    run.train(1)
    kept = run.listed[:]
    run.listed.clear()
    run.train(1)
    run.listed.extend(kept)


# --- Gradients: `make_grad` for the steps to come


def in_turns(run: Run) -> None:
    run.make_grad = lambda p, step, i: None if (step + i) % 3 == 0 else fresh_grad(p, step, i)


def for_the_first_only(run: Run) -> None:
    run.make_grad = lambda p, step, i: fresh_grad(p, step, i) if i == 0 else None


def for_nobody(run: Run) -> None:
    run.make_grad = lambda p, step, i: None


def the_same_memory_again(run: Run) -> None:
    kept: dict[int, Tensor] = {}

    def make(param: Tensor, step: int, index: int) -> Tensor:
        grad = fresh_grad(param, step, index)
        return kept.setdefault(index, torch.empty_like(grad)).copy_(grad)

    run.make_grad = make


def views_at_odd_offsets(run: Run) -> None:
    def make(param: Tensor, step: int, index: int) -> Tensor:
        grad = fresh_grad(param, step, index).contiguous()
        flat = torch.full((3 + grad.numel() + 1,), float("nan"), dtype=grad.dtype)
        flat[3:-1] = grad.reshape(-1)
        return flat[3:-1].view(param.shape)

    run.make_grad = make


def views_into_one_buffer(run: Run) -> None:
    buffers = {dtype: torch.zeros(20_000, dtype=dtype) for dtype in (F16, BF16, F32, F64)}
    ends = dict.fromkeys(buffers, 1)

    def make(param: Tensor, step: int, index: int) -> Tensor:
        end = ends[param.dtype] + param.numel()
        view = buffers[param.dtype][ends[param.dtype] : end].view(param.shape)
        ends[param.dtype] = end + step % 2
        return view.copy_(fresh_grad(param, step, index))

    run.make_grad = make


def with_gaps(run: Run) -> None:
    def make(param: Tensor, step: int, index: int) -> Tensor:
        grad = fresh_grad(param, step, index)
        return torch.stack([grad, grad + 1], dim=-1)[..., 0]

    run.make_grad = make


def of_another_layout(run: Run) -> None:
    def make(param: Tensor, step: int, index: int) -> Tensor:
        grad = fresh_grad(param, step, index)
        if grad.dim() == 4:
            return grad.contiguous(memory_format=torch.channels_last)
        return grad.t().contiguous().t() if grad.dim() == 2 else grad

    run.make_grad = make


def expanded(run: Run) -> None:
    run.make_grad = lambda p, step, i: torch.full((), 0.5 + step, dtype=p.dtype).expand(p.shape)


def made_in_inference_mode(run: Run) -> None:
    def make(param: Tensor, step: int, index: int) -> Tensor:
        with torch.inference_mode():
            return fresh_grad(param, step, index)

    run.make_grad = make


def given_by_list(run: Run) -> None:
    run.by_list = True


def of_other_dtypes(run: Run) -> None:
    run.by_list = True
    dtypes = (F16, BF16, F32, F64)
    run.make_grad = lambda p, step, i: fresh_grad(p, step, i).to(dtypes[(step + i) % 4])


def given_by_list_and_then_not(run: Run) -> None:
    run.by_list = True
    run.train(2)
    run.by_list = False


CHANGES: tuple[Callable[[Run], None], ...] = (
    put_another_in_its_place,
    put_another_in_its_place_with_its_state,
    put_another_of_another_shape_in_its_place,
    reverse,
    rotate,
    shorten,
    shorten_at_the_end,
    shorten_with_the_state,
    shorten_and_extend,
    extend,
    insert_at_the_front,
    give_the_group_another_list,
    move_data,
    exchange_data,
    give_data_another_shape_and_drop_the_state,
    give_data_and_state_another_shape,
    lay_data_otherwise,
    exchange_in_torch,
    exchange_two_parameters_in_torch,
    add_a_group,
    add_a_group_in_front,
    add_an_empty_group,
    remove_a_group,
    exchange_groups,
    exchange_the_lists_of_groups,
    move_a_parameter_to_another_group,
    empty_the_lists,
    in_turns,
    for_the_first_only,
    for_nobody,
    the_same_memory_again,
    views_at_odd_offsets,
    views_into_one_buffer,
    with_gaps,
    of_another_layout,
    expanded,
    made_in_inference_mode,
    given_by_list,
    of_other_dtypes,
    given_by_list_and_then_not,
)


@each_kind
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_steps_after_a_change_are_those_of_a_new_optimizer(
    change: Callable[[Run], None], kind: str
) -> None:
    run = make_run(kind)
    run.train(2)
    change(run)
    run.train(3)


@pytest.mark.parametrize("keep_state", [False, True], ids=["new state", "state moved"])
@pytest.mark.parametrize("index", [0, 2, 5], ids=["first", "middle", "last"])
def test_a_new_parameter_at_the_address_of_a_freed_one_is_a_new_one(
    index: int, keep_state: bool
) -> None:
    reused = 0
    for _ in range(20):
        run = make_run("fp32")
        run.train(2)
        values = torch.randn_like(run.listed[index])
        address, state = id(run.listed[index]), run.optimizer.state.pop(run.listed[index])
        del run.listed[index]
        new = parameter_at(address, values)
        reused += id(new) == address
        run.listed.insert(index, new)
        if keep_state:
            run.optimizer.state[new] = state
        run.train(2)
        assert run.optimizer.state[new]["step"] == (4 if keep_state else 2)
    assert reused > 10  # else CPython has given few of them the old address
