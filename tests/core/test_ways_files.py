"""Each way goes on from a file and from a copy to the bit, and refuses what does not fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import INF, assert_same
from way_runs import exact
from ways import WAYS, Twin, Way, train, ways_with

pytestmark = pytest.mark.usefixtures("amp_off", "other_device")

# The first part ends with the counts of the scale in mid-way.
FIRST = [None, None, INF, INF, None, None, None, None, INF, None]
SECOND = [None, INF, None, None, None, None, INF, None]


@pytest.mark.every_case
@ways_with("torch's interface")
@pytest.mark.parametrize("late", [False, True], ids=["before a step", "after steps"])
def test_a_run_goes_on_from_a_file_to_the_bit(late: bool, way: Way, device: torch.device) -> None:
    run = way.start(device)
    train(run, None, FIRST)
    saved = run.save()
    train(run, None, SECOND, first=len(FIRST))
    expected, scale = run.numbers(), run.scale
    resumed = way.start(device)
    if late:
        train(resumed, None, [None, INF])
        resumed.zero_grad()
    resumed.load(saved)
    train(resumed, None, SECOND, first=len(FIRST))
    assert_same(resumed.numbers(), expected)
    assert resumed.scale == scale


@ways_with("copies", "torch's interface")
@pytest.mark.parametrize(
    "by",
    [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("steps", [0, len(FIRST)], ids=["new", "used"])
def test_a_copy_goes_on_and_the_original_too(
    steps: int, by: Callable[[Any], Any], way: Way, device: torch.device
) -> None:
    run = way.start(device)
    train(run, None, FIRST[:steps])
    run.zero_grad()
    other = run.copied(by)
    assert_same(other.numbers(), run.numbers())
    before = run.numbers()
    train(other, None, [None, INF], first=steps)
    assert_same(run.numbers(), before)
    train(run, None, [None, None], first=steps)
    train(other, None, [None], first=steps + 1)  # Only the scale differs now.
    assert_same(other.numbers(), run.numbers())


@ways_with("torch's interface")
def test_the_state_of_the_optimizer_alone_is_loaded(way: Way, device: torch.device) -> None:
    run = way.start(device)
    alone = Twin(run)
    for number in range(3):
        alone.step(*(exact(p.shape, number).to(device) for p in alone.params))
    twin = Twin(run)
    for each in (run, twin):
        each.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    train(run, twin, [None, INF, None])
    twin.assert_is(run)


def last_state(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """Faults are in the last of all tensors, so that half a load would show."""
    return lambda state: edit(state["state"][max(state["state"])])


def another_shape(state: dict[str, Any]) -> None:
    name = next(n for n, v in state.items() if torch.is_tensor(v) and v.dim() == 3)
    state[name] = torch.ones(2)


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no groups": (lambda s: s.pop("param_groups"), "param_groups|dynamic_loss_scale"),
    "a group too few": (lambda state: state["param_groups"].pop(), "group"),
    "a parameter too few": (lambda state: state["param_groups"][0]["params"].pop(), "group"),
    "no state": (lambda state: state.pop("state"), "state"),
}
SHAPES = {"a moment of another shape": (last_state(another_shape), "shape")}
OPTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a learning rate below 0": (lambda s: s["param_groups"][-1].update(lr=-1.0), "lr is -1.0"),
    "a number that is a word": (
        last_state(lambda s: s.update({[*s][-1]: "many"})),
        "many|type str",
    ),
}


each_file = pytest.mark.parametrize("alone", [False, True], ids=["of the way", "alone"])


def assert_refused(
    damage: tuple[Callable[[Any], Any], str], alone: bool, way: Way, device: torch.device
) -> None:
    """Demand an error for a damaged state of a way, or of the optimizer alone."""
    edit, words = damage
    run = way.start(device)
    train(run, None, FIRST)
    saved = copy.deepcopy((run.inner if alone else run.optimizer).state_dict())
    edit(saved if alone else run.inner_state(saved))
    run = way.start(device)
    train(run, None, SECOND)
    before, options, scale = run.numbers(), str(run.optimizer.param_groups), run.scale
    with pytest.raises((TypeError, ValueError, KeyError), match=words):
        run.optimizer.load_state_dict(saved)
    assert_same(run.numbers(), before)
    assert str(run.optimizer.param_groups) == options
    assert run.scale == scale
    train(run, None, [None])


@ways_with("torch's interface")
@each_file
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=[*DAMAGES])
def test_a_state_of_other_groups_is_refused_and_changes_nothing(
    damage: Any, alone: bool, way: Way, device: torch.device
) -> None:
    assert_refused(damage, alone, way, device)


@ways_with("torch's interface", "refused shapes")
@each_file
@pytest.mark.parametrize("damage", SHAPES.values(), ids=[*SHAPES])
def test_a_state_of_other_shapes_is_refused_and_changes_nothing(
    damage: Any, alone: bool, way: Way, device: torch.device
) -> None:
    assert_refused(damage, alone, way, device)


@ways_with("torch's interface", "refused options")
@each_file
@pytest.mark.parametrize("damage", OPTIONS.values(), ids=[*OPTIONS])
def test_a_state_of_wrong_numbers_is_refused_and_changes_nothing(
    damage: Any, alone: bool, way: Way, device: torch.device
) -> None:
    assert_refused(damage, alone, way, device)


@pytest.mark.parametrize(
    "way", [way for way in WAYS if way.store == "own" and way.inner == "AdamW"], ids=str
)
def test_what_torch_refuses_half_way_is_undone(way: Way, device: torch.device) -> None:
    damage = last_state(lambda state: state.update(step="many")), "could not convert"
    assert_refused(damage, False, way, device)
