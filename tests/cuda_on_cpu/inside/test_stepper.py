"""Optimizers on streams and in graphs, and what the host hears of a step that looks for inf."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import on_cuda_kernels
import op_cases
import pytest
import step_list_cases
import torch
from fused_adam_cases import Unchanged, assert_same_state, grad_for
from scaled_steps import take_step
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.multi_tensor_apply import _steps as step_lists
from apex_mp.optimizers import FusedAdam, FusedSGD
from apex_mp.optimizers._fused import FusedOptimizer

SHIM = on_cuda_kernels.SHIM
CAPTURE_REFUSED = "this step cannot be captured in a CUDA graph"
SIZES = ((5,), (600,), (4, 3), (1,))


class Kind(NamedTuple):
    """An optimizer.

    Attributes:
        cls: Its class.
        options: For its constructor.
        tensor: The name of one that its state has.
        change: A name and another value of an option.
        steps: So many are to be taken before one can be captured.
    """

    cls: Any
    options: dict[str, Any]
    tensor: str
    change: tuple[str, Any]
    steps: int = 1


MOMENTUM = {"momentum": 0.5, "dampening": 0.25}
KINDS = {
    "adam": Kind(FusedAdam, {}, "exp_avg", ("betas", (0.5, 0.6))),
    "sgd": Kind(
        FusedSGD, {"momentum": 0.5, "nesterov": True}, "momentum_buffer", ("momentum", 0.75)
    ),
    # The first step has flags of fresh buffers, the others have none.
    "sgd dampened": Kind(FusedSGD, MOMENTUM, "momentum_buffer", ("dampening", 0.5), steps=2),
}
kind = KINDS["adam"]


@pytest.fixture(params=KINDS.values(), ids=KINDS, autouse=True)
def each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "kind", request.param)


def make(**options: Any) -> FusedOptimizer:
    """Two groups of fp32 parameters whose gradients stay where they are."""
    params = [Parameter(grad_for(torch.empty(size), 0, i)) for i, size in enumerate(SIZES)]
    for param in params:
        param.grad = torch.empty_like(param)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    return kind.cls(groups, **{"lr": 0.1, **kind.options, **options})


def params_of(optimizer: FusedOptimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give(optimizer: FusedOptimizer, step: int) -> None:
    for i, param in enumerate(params_of(optimizer)):
        if param.grad is not None:
            param.grad.copy_(grad_for(param, step, i))


def train(optimizer: FusedOptimizer, *steps: int) -> None:
    for step in steps:
        give(optimizer, step)
        optimizer.step()


def warm_up(optimizer: FusedOptimizer) -> None:
    """Take the steps that must come before one can be captured."""
    train(optimizer, *range(-kind.steps, 0))


@contextmanager
def capture() -> Iterator[None]:
    """Keep launches for `replay` instead of running them."""
    SHIM.cuda_on_cpu_capture(True)
    try:
        yield
    finally:
        SHIM.cuda_on_cpu_capture(False)


def replay(optimizer: FusedOptimizer, *steps: int) -> None:
    for step in steps:
        give(optimizer, step)
        assert SHIM.cuda_on_cpu_replay() > 0


def pair(**options: Any) -> tuple[FusedOptimizer, FusedOptimizer]:
    """Return an optimizer with a captured step, and one that has come as far without a graph."""
    captured, plain = make(**options), make(**options)
    for optimizer in (captured, plain):
        warm_up(optimizer)
    with capture():
        captured.step()
    assert_same_state(captured, plain)  # A capture steps nothing.
    return captured, plain


def test_a_replay_is_a_step() -> None:
    captured, plain = pair()
    replay(captured, 1, 2, 3)
    train(plain, 1, 2, 3)
    assert_same_state(captured, plain)


def test_steps_and_replays_follow_each_other() -> None:
    captured, plain = pair()
    replay(captured, 1)
    train(captured, 2)
    replay(captured, 3)
    train(plain, 1, 2, 3)
    assert_same_state(captured, plain)


def test_a_tensor_as_lr_is_read_by_each_replay() -> None:
    captured, plain = pair(lr=torch.tensor(0.1))
    for optimizer, take in ((captured, replay), (plain, train)):
        optimizer.param_groups[0]["lr"].fill_(0.1)  # Both have the same one.
        take(optimizer, 1)
        optimizer.param_groups[0]["lr"].fill_(0.7)
        take(optimizer, 2)
    assert_same_state(captured, plain)


def test_each_replay_leaves_gradients_unscaled() -> None:
    optimizer = make()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    train(optimizer, 0)
    with capture():
        optimizer.step()
    replay(optimizer, 1)
    for i, param in enumerate(params_of(optimizer)):
        if param.grad is not None:
            assert_same_bits(param.grad, grad_for(param, 1, i) / 4.0)


def test_a_capture_that_is_refused_leaves_no_state() -> None:
    optimizer = make()
    give(optimizer, 0)
    with Unchanged(optimizer), capture(), pytest.raises(RuntimeError):
        optimizer.step()


def test_an_lr_that_is_converted_for_the_step_lives_as_long() -> None:
    one, other = make(lr=torch.tensor(0.1).half()), make(lr=float(torch.tensor(0.1).half()))
    for optimizer in (one, other):
        train(optimizer, 0, 1)
    for param, wanted in zip(params_of(one), params_of(other), strict=True):
        assert_same_bits(param.detach(), wanted.detach())


def test_steps_of_an_empty_parameter_are_counted() -> None:
    param = Parameter(torch.empty(0, 3))
    optimizer = FusedAdam([param, Parameter(torch.ones(3))])
    for each in params_of(optimizer):
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


def set_lr(optimizer: FusedOptimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.7


def drop_a_gradient(optimizer: FusedOptimizer) -> None:
    params_of(optimizer)[1].grad = None


def move_state(optimizer: FusedOptimizer) -> None:
    state = optimizer.state[params_of(optimizer)[2]]
    state[kind.tensor] = state[kind.tensor].clone()


def unscale_by_one(optimizer: FusedOptimizer) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)


def step_and_see_the_table(optimizer: FusedOptimizer, **options: Any) -> torch.Tensor:
    """Take a step; return a part of the table's memory, which lives as long as it is held."""
    take_step(optimizer, **options)
    return optimizer._engine.plan.outcome


CHANGES = {"lr": set_lr, "state elsewhere": move_state}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@each_change
def test_a_step_unlike_the_last_one_cannot_be_captured(
    change: Callable[[FusedOptimizer], None],
) -> None:
    optimizer = make()
    train(optimizer, 0)
    change(optimizer)
    with Unchanged(optimizer), capture(), pytest.raises(RuntimeError, match=CAPTURE_REFUSED):
        optimizer.step()
    train(optimizer, 1)
    with capture():
        optimizer.step()


def test_a_captured_step_leaves_a_parameter_alone_that_had_no_gradient() -> None:
    captured, plain = make(), make()
    for optimizer in (captured, plain):
        warm_up(optimizer)
        drop_a_gradient(optimizer)
    with capture():
        captured.step()
    params_of(captured)[1].grad = torch.ones(SIZES[1])
    replay(captured, 1, 2)
    train(plain, 1, 2)
    assert_same_state(captured, plain)


def test_the_table_stays_while_gradients_come_and_go() -> None:
    optimizer, plain = make(), make()
    train(optimizer, 0)
    train(plain, 0)
    table = step_and_see_the_table(optimizer)
    plain.step()
    for step, absent in enumerate(([1], [0, 2], [0, 1, 2, 3], [], [3]), 1):
        for each in (optimizer, plain):
            for i, param in enumerate(params_of(each)):
                param.grad = None if i in absent else torch.empty_like(param)
            give(each, step)
        move_state(plain)  # Which has a new table, and knows nothing of the old one.
        versions = [param._version for param in params_of(optimizer)]
        assert step_and_see_the_table(optimizer).data_ptr() == table.data_ptr()
        plain.step()
        assert_same_state(optimizer, plain)
        for i, param in enumerate(params_of(optimizer)):
            assert (param._version > versions[i]) == (i not in absent)


def test_a_state_that_has_moved_is_stepped_where_it_is() -> None:
    optimizer, plain = make(), make()
    for step in range(3):
        train(optimizer, step)
        train(plain, step)
        move_state(optimizer)
    assert_same_state(optimizer, plain)


def test_a_table_that_a_graph_has_is_taken_back_when_it_fits_again() -> None:
    captured, plain = pair()
    table = step_and_see_the_table(captured)
    plain.step()
    for step in (1, 2, 3):
        unscale_by_one(captured)
        train(captured, step)
        del captured.grad_scale, captured.found_inf
        assert step_and_see_the_table(captured).data_ptr() == table.data_ptr()
        train(plain, step)
        plain.step()
    assert_same_state(captured, plain)


def test_a_step_after_one_whose_second_launch_failed_is_sound() -> None:
    count = 4200  # More gradients than one launch carries.
    params = [Parameter(torch.ones(1)) for _ in range(count)]
    optimizer, plain = FusedAdam(params, max_grad_norm=1.0), make_like(params)
    for each in (optimizer, plain):
        for param in params_of(each):
            param.grad = torch.ones(1)
        each.step()
    SHIM.cuda_on_cpu_fail_after(1)
    with pytest.raises(RuntimeError, match="this launch fails"):
        optimizer.step()
    for each in (optimizer, plain):
        for param in params_of(each):
            param.grad = torch.full((1,), 3.0)
        each.step()
    assert_same_state(optimizer, plain)


def make_like(params: list[Parameter]) -> FusedOptimizer:
    return FusedAdam([Parameter(param.detach().clone()) for param in params], max_grad_norm=1.0)


def test_a_step_of_which_the_host_wants_to_hear_cannot_be_captured() -> None:
    optimizer = make()
    give(optimizer, 0)
    take_step(optimizer, check=True)
    with capture(), pytest.raises(RuntimeError, match=CAPTURE_REFUSED):
        take_step(optimizer, check=True)


def test_changed_options_count_in_replays_once_they_are_refreshed() -> None:
    captured, plain = pair(weight_decay=0.1)
    replay(captured, 1)
    train(plain, 1)
    changes = {"lr": 0.7, "weight_decay": 0.3, kind.change[0]: kind.change[1]}
    captured.param_groups[1].update(changes)
    replay(captured, 2)
    train(plain, 2)
    plain.param_groups[1].update(changes)
    captured.refresh_hyperparameters()
    replay(captured, 3, 4)
    train(plain, 3, 4)
    assert_same_state(captured, plain)


def test_a_refresh_is_heard_before_the_next_step_is_captured() -> None:
    captured, plain = make(), make()
    for optimizer in (captured, plain):
        warm_up(optimizer)
        set_lr(optimizer)
    captured.refresh_hyperparameters()
    with capture():
        captured.step()
    replay(captured, 1)
    train(plain, 1)
    assert_same_state(captured, plain)


def test_a_graph_outlives_steps_unlike_it() -> None:
    captured, plain = pair()
    for optimizer in (captured, plain):
        optimizer.param_groups[0]["lr"] = 0.5
        unscale_by_one(optimizer)
        train(optimizer, 1)
        del optimizer.grad_scale, optimizer.found_inf
    captured.refresh_hyperparameters()
    replay(captured, 2)
    train(plain, 2)
    assert_same_state(captured, plain)


def test_a_replay_has_chunks_of_the_size_that_was_captured() -> None:
    captured, plain = make(), make()
    for optimizer in (captured, plain):
        add_params(optimizer, 1, 5000)
        warm_up(optimizer)
    with capture():
        captured.step()
    for optimizer in (captured, plain):
        others = add_params(optimizer, 528, 1)  # So many that chunks of a step are larger.
        train(optimizer, 1)
        for param in others:
            param.grad = None
    replay(captured, 2)
    train(plain, 2)
    assert_same_state(captured, plain)


def add_params(optimizer: FusedOptimizer, count: int, size: int) -> list[Parameter]:
    params = [Parameter(torch.ones(size)) for _ in range(count)]
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer.add_param_group({"params": params})
    return params


def test_steps_on_one_stream_wait_for_those_on_the_other() -> None:
    optimizer, plain = make(), make()
    on_cuda_kernels.plan.take_recorded()
    for step, stream in enumerate((0, 1, 1, 0, 1)):
        SHIM.cuda_on_cpu_use_stream(stream)
        train(optimizer, step)
    # The table is one of the first stream; its memory is used on the others as well.
    assert on_cuda_kernels.plan.take_recorded() == [1, 0, 1]
    SHIM.cuda_on_cpu_wait_for_all()
    train(plain, *range(5))
    assert_same_state(optimizer, plain)


def test_a_new_table_and_new_options_wait_for_steps_on_the_other_stream() -> None:
    optimizer, plain = make(), make()
    train(optimizer, 0)
    SHIM.cuda_on_cpu_use_stream(1)
    move_state(optimizer)
    train(optimizer, 1)
    SHIM.cuda_on_cpu_use_stream(0)
    set_lr(optimizer)
    optimizer.refresh_hyperparameters()
    SHIM.cuda_on_cpu_use_stream(1)
    train(optimizer, 2)
    SHIM.cuda_on_cpu_wait_for_all()
    train(plain, 0, 1)
    set_lr(plain)
    train(plain, 2)
    assert_same_state(optimizer, plain)


def test_the_host_hears_of_norms_and_of_inf() -> None:
    optimizer = make(max_grad_norm=1.0)
    for step in range(2):
        give(optimizer, step)
        outcome = take_step(optimizer, check=True, scale=4.0).outcome
        assert not outcome.found_inf
        wanted = [
            math.sqrt(sum(param.grad.double().square().sum().item() for param in group["params"]))
            for group in optimizer.param_groups
        ]
        assert outcome.norms == pytest.approx([norm / 4 for norm in wanted], rel=1e-6)
    params_of(optimizer)[3].grad.fill_(math.inf)
    with Unchanged(optimizer):
        outcome = take_step(optimizer, check=True).outcome
    assert outcome.found_inf


@pytest.mark.parametrize("rule", step_list_cases.RULES, ids=str)
def test_a_step_over_lists_is_captured_with_its_table(
    rule: step_list_cases.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []  # On a GPU the graph keeps their memory.

    def plan(*args: Any, **options: Any) -> Any:
        plans.append(_C.StepPlan(*args, **options))
        return plans[-1]

    monkeypatch.setattr(step_lists, "_C", SimpleNamespace(StepPlan=plan))
    dtypes = step_list_cases.STEP_DTYPES[2]
    call = step_list_cases.sample(rule, op_cases.A_FEW, dtypes, torch.device("cpu"))
    plain = step_list_cases.copy_of(call)
    with capture():
        step_lists.step_lists(**call)
    step_list_cases.assert_same_call(call, plain)
    for _ in range(2):
        step_lists.step_lists(**plain)
        SHIM.cuda_on_cpu_replay()
        step_list_cases.assert_same_call(call, plain)
