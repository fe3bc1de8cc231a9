"""The step plan after options, state or the whole optimizer are replaced; hooks around it."""

from __future__ import annotations

import collections
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import F32, F64, MOMENTS, assert_same_state
from plan_cases import KINDS, Run, fresh_grad, make_run, parameter
from tolerances import assert_same_bits

each_kind = pytest.mark.parametrize("kind", KINDS)

# --- Options


OPTIONS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.5},
    "lr of 0": {"lr": 0},
    "tensor lr": {"lr": torch.tensor(0.3)},
    "float64 lr of one dimension": {"lr": torch.tensor([0.3], dtype=F64)},
    "lr that requires grad": {"lr": torch.tensor(0.3, requires_grad=True)},
    "beta1": {"betas": (0.1, 0.999)},
    "beta2": {"betas": (0.9, 0.5)},
    "betas as a list": {"betas": [0.8, 0.9]},
    "eps": {"eps": 0.1},
    "weight_decay": {"weight_decay": 0.5},
    "adam_w_mode": {"adam_w_mode": False},
    "bias_correction": {"bias_correction": False},
    "eps_inside_sqrt": {"eps_inside_sqrt": True, "eps": 0.01},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "maximize": {"maximize": True},
    "master_weights": {"master_weights": True},
    "no master_weights": {"master_weights": False},
}


@each_kind
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_option_written_into_one_group_counts_there_from_the_next_step(
    options: dict[str, Any], kind: str
) -> None:
    run = make_run(kind)
    run.train(2)
    before = dict(run.group)
    run.group.update(options)
    run.train(2)
    if "master_weights" not in options:  # else the parameter has gone on without its master
        run.group.update(before)
        run.train(1)


# --- State


def clear_it(run: Run) -> None:
    run.optimizer.state.clear()


def put_a_new_dictionary(run: Run) -> None:
    run.optimizer.state = collections.defaultdict(dict)


def put_a_plain_dictionary(run: Run) -> None:
    run.optimizer.state = dict(run.optimizer.state)


def put_an_ordered_dictionary_the_other_way_round(run: Run) -> None:
    run.optimizer.state = collections.OrderedDict(reversed([*run.optimizer.state.items()]))


def reorder_it_in_place(run: Run) -> None:
    state = run.optimizer.state
    for param in [*state][::2]:
        state[param] = state.pop(param)


def delete_one_entry(run: Run) -> None:
    del run.optimizer.state[run.params[1]]


def delete_one_entry_and_add_a_stranger(run: Run) -> None:
    run.optimizer.state[parameter(4)] = run.optimizer.state.pop(run.params[1])


def empty_one_entry(run: Run) -> None:
    run.optimizer.state[run.params[1]] = {}


def add_strangers(run: Run) -> None:
    run.optimizer.state = {
        parameter(3): {"step": torch.ones(())},
        **run.optimizer.state,
        "not a tensor": {},
    }


def exchange_two_entries(run: Run) -> None:
    run.listed.extend([parameter(9), parameter(9)])
    run.train(2)
    one, other = run.listed[-2:]
    state = run.optimizer.state
    state[one], state[other] = state[other], state[one]


def replace_entries(run: Run) -> None:
    for param, state in run.optimizer.state.items():
        run.optimizer.state[param] = {key: value.clone() for key, value in state.items()}


def replace_tensors(run: Run) -> None:
    for state in run.optimizer.state.values():
        for key in state:
            state[key] = state[key] * 0.5 if key in MOMENTS else state[key].clone()


def replace_their_data(run: Run) -> None:
    for state in run.optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def replace_the_step(run: Run) -> None:
    for index, param in enumerate(run.params):
        run.optimizer.state[param]["step"] = torch.tensor(10.0 + index)


def replace_the_step_by_one_of_one_dimension(run: Run) -> None:
    run.optimizer.state[run.params[1]]["step"] = torch.full((1,), 5.0)


def let_all_share_one_flat_tensor(run: Run) -> None:
    states = [*run.optimizer.state.values()]
    flat = torch.zeros(10_000, dtype=F32)
    end = 1  # so that nothing is aligned
    for state in states:
        for key, value in state.items():
            if value.dtype == F32:
                view = flat[end : end + value.numel()].as_strided(
                    value.shape, value.stride(), storage_offset=end
                )
                state[key] = view.copy_(value)
                end += value.numel()


def lay_moments_otherwise(run: Run) -> None:
    for state in run.optimizer.state.values():
        for key in state.keys() - {"step"}:
            if state[key].dim() == 4:
                state[key] = state[key].contiguous(memory_format=torch.channels_last)


def add_extra_keys(run: Run) -> None:
    for param, state in run.optimizer.state.items():
        run.optimizer.state[param] = {"before": torch.ones(3), **state, "max": torch.zeros(1)}


def use_keys_that_are_other_objects(run: Run) -> None:
    for param, state in run.optimizer.state.items():
        run.optimizer.state[param] = {
            "".join([*key]): value for key, value in reversed([*state.items()])
        }


def drop_one_master(run: Run) -> None:
    run.optimizer._own_masters.kept.clear()


def resize_one(run: Run) -> None:
    param = run.params[0]
    state = run.optimizer.state[param]
    for name in MOMENTS:
        state[name] = torch.cat([state[name]] * 2)
    param.grad = None
    param.data = torch.cat([param.detach()] * 2)


def load_its_own_state(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def load_it_from_a_file(run: Run) -> None:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    run.optimizer.load_state_dict(torch.load(file, weights_only=True))


def load_an_earlier_state(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = [param.detach().clone() for param in run.params]
    run.train(2)
    run.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, weight in zip(run.params, weights, strict=True):
            param.copy_(weight)


def load_the_state_of_torch(run: Run) -> None:
    groups = [{"params": group["params"]} for group in run.optimizer.param_groups]
    other = torch.optim.AdamW(groups, lr=0.2)
    other.step()
    run.optimizer.load_state_dict(other.state_dict())


def go_on_with_a_deep_copy(run: Run) -> None:
    run.optimizer = copy.deepcopy(run.optimizer)


def go_on_with_a_shallow_copy(run: Run) -> None:
    run.optimizer = copy.copy(run.optimizer)


def go_on_with_a_pickled_one(run: Run) -> None:
    run.optimizer = pickle.loads(pickle.dumps(run.optimizer))


STATE_CHANGES: tuple[Callable[[Run], None], ...] = (
    clear_it,
    put_a_new_dictionary,
    put_a_plain_dictionary,
    put_an_ordered_dictionary_the_other_way_round,
    reorder_it_in_place,
    delete_one_entry,
    delete_one_entry_and_add_a_stranger,
    empty_one_entry,
    add_strangers,
    exchange_two_entries,
    replace_entries,
    replace_tensors,
    replace_their_data,
    replace_the_step,
    replace_the_step_by_one_of_one_dimension,
    let_all_share_one_flat_tensor,
    lay_moments_otherwise,
    add_extra_keys,
    use_keys_that_are_other_objects,
    drop_one_master,
    resize_one,
    load_its_own_state,
    load_it_from_a_file,
    load_an_earlier_state,
    load_the_state_of_torch,
    go_on_with_a_deep_copy,
    go_on_with_a_shallow_copy,
    go_on_with_a_pickled_one,
)


@each_kind
@pytest.mark.parametrize("change", STATE_CHANGES, ids=lambda change: change.__name__)
def test_steps_after_a_change_of_state_are_those_of_a_new_optimizer(
    change: Callable[[Run], None], kind: str
) -> None:
    run = make_run(kind)
    run.train(2)
    change(run)
    run.train(3)


LACKING: dict[str, Callable[[dict[str, Any]], object]] = {
    "no step": lambda state: state.pop("step"),
    "no exp_avg": lambda state: state.pop("exp_avg"),
    "no exp_avg_sq": lambda state: state.pop("exp_avg_sq"),
    "a step that is a number": lambda state: state.update(step=3),
    "an exp_avg that is None": lambda state: state.update(exp_avg=None),
}


@pytest.mark.parametrize("spoil", LACKING.values(), ids=LACKING)
def test_a_state_that_lacks_something_is_completed_or_refused_but_never_passed_over(
    spoil: Callable[[dict[str, Any]], object],
) -> None:
    run = make_run("bf16 with masters")
    run.train(2)
    param = run.params[5]
    spoil(run.optimizer.state[param])
    before = [one.detach().clone() for one in run.params]
    for index, one in enumerate(run.params):
        one.grad = fresh_grad(one, 9, index)
    refusal = ""
    try:
        run.optimizer.step()
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        refusal = str(error)
    assert "INTERNAL ASSERT" not in refusal
    assert torch.equal(param, before[5]) == bool(refusal)
    for one, old in zip(run.params, before, strict=True):
        if refusal:
            assert_same_bits(one.detach(), old)


# --- Around the step


@pytest.mark.parametrize("wraps", [False, True])
def test_a_step_that_is_patched_on_the_instance_steps(wraps: bool) -> None:
    run = make_run("two groups, mixed")
    run.train(2)
    original = run.optimizer.step
    calls = []

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    run.optimizer.step = functools.wraps(original)(patched) if wraps else patched
    run.train(2)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_thread_or_two_compute_the_same_bits(kind: str, restore_threads: None) -> None:
    runs = []
    for threads in (1, 2):
        torch.manual_seed(1)
        torch.set_num_threads(threads)
        run = make_run(kind)
        run.listed.append(parameter(300_001))
        run.group["max_grad_norm"] = 0.5
        for step in range(3):
            for index, param in enumerate(run.params):
                param.grad = fresh_grad(param, step, index)
            run.optimizer.step()
        runs.append(run)
    assert_same_state(runs[0].optimizer, runs[1].optimizer)
