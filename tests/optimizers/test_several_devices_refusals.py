"""What a step on several devices refuses; that nothing has changed then, and is kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import Unchanged, give_grads
from plan_cases import Run, fresh_grad, parameter
from several_devices_cases import side_of, spread
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.core.step import StepRequest
from apex_mp.optimizers import FusedAdam, _device_part, _several_devices
from apex_mp.optimizers._device_part import Part, split

each_warmth = pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "warm"])


@pytest.fixture(autouse=True)
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_part, "device_of", side_of)


def make_run(steps: int = 0) -> Run:
    """A run of two groups on both devices."""
    params = [parameter(size) for size in (4, 3, 5, 2)]
    run = Run(spread(FusedAdam([{"params": params[:3]}, {"params": params[3:]}], lr=0.1)))
    run.train(steps)
    give_grads(run.params, 9)
    return run


def sparse_grad(run: Run) -> None:
    run.params[2].grad = torch.ones(5).to_sparse()


def wrong_lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = torch.ones(2)


def wrong_found_inf(run: Run) -> None:
    run.optimizer.found_inf = torch.zeros(2)


def wrong_eps(run: Run) -> None:
    run.optimizer.param_groups[1]["eps"] = -1.0


SPOILERS: dict[Callable[[Run], None], str] = {
    sparse_grad: "sparse",
    wrong_lr: "lr is a tensor of 2 elements; it must have 1",
    wrong_found_inf: "found_inf is a tensor of 2 elements; it must have 1",
    wrong_eps: "eps is -1",
}


@each_warmth
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_what_one_device_refuses_changes_nothing_on_any(
    spoil: Callable[[Run], None], max_grad_norm: float, steps_before: int
) -> None:
    run = make_run(steps_before)
    for group in run.optimizer.param_groups:
        group["max_grad_norm"] = max_grad_norm
    good = [dict(group) for group in run.optimizer.param_groups]
    with Unchanged(run.optimizer):
        spoil(run)
        with pytest.raises((RuntimeError, ValueError), match=SPOILERS[spoil]):
            run.optimizer.step()
        for group, old in zip(run.optimizer.param_groups, good, strict=True):
            group.update(old)
    assert len(run.optimizer.state) == (4 if steps_before else 0)
    vars(run.optimizer).pop("found_inf", None)
    give_grads(run.params, 9)
    run.optimizer.step()
    assert len(run.optimizer.state) == 4


@pytest.mark.parametrize("index", [1, 3])
def test_state_that_does_not_fit_is_named_by_its_place_in_the_whole_group(index: int) -> None:
    run = make_run(steps=2)
    run.listed.insert(0, parameter(7))  # would get a state
    give_grads(run.params, 9)
    state = run.optimizer.state[run.listed[index]]
    good = state["exp_avg"]
    with Unchanged(run.optimizer):
        state["exp_avg"] = good.half()
        sentence = rf"FusedAdam: exp_avg\[0\]\[{index}\] is"
        with pytest.raises((TypeError, RuntimeError), match=sentence):
            run.optimizer.step()
        state["exp_avg"] = good


def test_an_output_that_does_not_fit_is_named_with_its_parameter() -> None:
    run = make_run()
    outputs = [[torch.zeros_like(p) for p in g["params"]] for g in run.optimizer.param_groups]
    outputs[0][2] = torch.zeros(4)
    grads = [[p.grad for p in g["params"]] for g in run.optimizer.param_groups]
    sentence = r"output_params\[0\]\[2\] has .*params\[0\]\[2\]"
    with Unchanged(run.optimizer), pytest.raises(RuntimeError, match=sentence):
        run.optimizer.step(grads=grads, output_params=outputs)


@pytest.mark.parametrize("name", ["grads", "grads_of", "copies"])
@pytest.mark.parametrize(
    "lists", [[[None]], [[None] * 3], [None, None], [[None] * 3, [None] * 2], [[None] * 4, [None]]]
)
def test_lists_that_do_not_fit_the_groups_are_refused(lists: Any, name: str) -> None:
    run = make_run()
    wish = r"given for group \d is not a list with one item for each of its \d parameters"
    with pytest.raises(ValueError, match=wish):
        run.optimizer.step(grads=StepRequest(**{name: lists}))
    assert not run.optimizer.state


def test_a_list_of_fewer_groups_is_refused_though_they_are_empty() -> None:
    optimizer = spread(FusedAdam([{"params": []}, {"params": []}]))
    with pytest.raises(ValueError, match="given for group 1 is not a list"):
        optimizer._read(optimizer._plan, StepRequest(grads=[[]]), 1.0, {})


@each_warmth
def test_a_gradient_where_there_are_no_kernels_is_refused_by_name(steps_before: int) -> None:
    run = make_run(steps_before)
    kept = run.listed[:]
    with Unchanged(run.optimizer):
        run.listed[1] = Parameter(torch.ones(3, device="meta"))
        run.listed[1].grad = torch.ones(3, device="meta")
        wish = "which this build of apex_mp has no kernels; it must be on the CPU or on a CUDA"
        with pytest.raises(RuntimeError, match=rf"params\[0\]\[1\] is on meta(:0)?, for {wish}"):
            run.optimizer.step()
        run.listed[:] = kept


def test_without_kernels_for_cuda_the_command_that_builds_them_is_told() -> None:
    param = Parameter(torch.ones(3, device="meta"), requires_grad=False)
    groups: Any = FusedAdam([param]).param_groups
    param.requires_grad_().grad = torch.ones(3, device="meta")
    lists = dict.fromkeys(["grads", "grads_of", "copies"])
    plan = FusedAdam._new_plan()
    part = Part("FusedAdam", torch.device("cuda", 1), plan, [[0]], groups, lists)
    part.read({}, lambda number, index: {}, 1.0)
    with pytest.raises(RuntimeError, match=r"params\[0\]\[0\] is on cuda:1, .*\n.*FORCE_CUDA=1 "):
        part.has_kernels()


@each_warmth
def test_a_capture_of_several_devices_is_refused(
    steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(steps_before)
    capturing = side_of(torch.ones(1))
    monkeypatch.setattr(_several_devices, "is_capturing", lambda device: device == capturing)
    with Unchanged(run.optimizer), pytest.raises(RuntimeError, match="is capturing a CUDA graph, "):
        run.optimizer.step()
    # What has come to be on one device, StepPlan decides about.
    alone = spread(FusedAdam([parameter(3)]))
    give_grads(alone.param_groups[0]["params"], 0)
    alone.step()
    assert type(alone._plan) is _C.StepPlan


def test_the_cpu_is_stepped_last_and_is_home_only_where_it_is_alone() -> None:
    params = [torch.ones(4), torch.ones(2, device="meta"), torch.ones(6)]
    groups: Any = FusedAdam([Parameter(p, requires_grad=False) for p in params]).param_groups
    parts = split("FusedAdam", groups, {}, lambda device: FusedAdam._new_plan())
    assert [part.device.type for part in parts] == ["meta", "cpu"]
    assert [len(part.groups[0]["params"]) for part in parts] == [1, 2]


# --- Nothing is kept alive.


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("refresh", [False, True], ids=["step", "refresh"])
def test_between_steps_nothing_is_kept_alive(refresh: bool, max_grad_norm: float) -> None:
    run = make_run()
    run.make_grad = lambda p, step, i: torch.stack([fresh_grad(p, step, i)] * 2, -1)[..., 0]
    for group in run.optimizer.param_groups:
        group["max_grad_norm"] = max_grad_norm
    optimizer = run.optimizer
    for step in range(3):
        for index, param in enumerate(run.params):
            param.grad = run.make_grad(param, step, index)
        optimizer.step()
    if refresh:
        optimizer.refresh_hyperparameters()
    kept = [weakref.ref(param) for param in run.params]
    kept += [weakref.ref(param.grad) for param in run.params if param.grad is not None]
    kept += [weakref.ref(t) for state in optimizer.state.values() for t in state.values()]
    optimizer.zero_grad()
    optimizer.state.clear()
    del param
    for group in optimizer.param_groups:
        group["params"].clear()
    del group
    assert alive(kept) == 0


class GradOnDemand(Parameter):
    """A parameter that makes its gradient when it is asked for it."""

    made: weakref.ref[Tensor] | None = None

    @property  # type: ignore[override]
    def grad(self) -> Tensor:
        grad = torch.ones_like(self)
        self.made = weakref.ref(grad)
        return grad


@pytest.mark.parametrize("refused", ["not", "by its own device", "by another", "by the run"])
def test_a_gradient_that_was_made_on_demand_is_free_after_the_step(refused: str) -> None:
    on_demand = GradOnDemand(torch.ones(4))
    other = parameter(3 if refused == "by another" else 2)
    params = [on_demand, other, parameter(5)]
    optimizer = spread(FusedAdam(params))
    params[2].grad = torch.ones(5)
    other.grad = torch.ones_like(other)
    optimizer.step()
    if refused.startswith("by its") or refused == "by another":
        other.grad = other.grad.to_sparse()
    if refused == "by the run":
        optimizer.found_inf = torch.zeros(2)
    if refused == "not":
        optimizer.step()
    else:
        with pytest.raises((RuntimeError, ValueError)):
            optimizer.step()
    assert on_demand.made is not None
    assert alive([on_demand.made]) == 0
