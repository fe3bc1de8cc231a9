"""A Ctrl-C anywhere in the package: the next steps train, and the step is whole or not taken."""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Any

import pytest
import torch
from fp16_cases import assert_same
from interrupts import run_until
from way_runs import Run
from ways import Way, give, grads_of, ways_with

_DRAWN = 3

pytestmark = pytest.mark.usefixtures("amp_off", "other_device")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def iterate(run: Run, number: int, clip: bool) -> None:
    run.zero_grad()
    give(run, grads_of(run, number))
    if clip:
        run.clip(1.0)
    run.step()


def started(way: Way, clip: bool, device: torch.device, *, steps: int = 1) -> Run:
    run = way.start(device)
    for _ in range(steps):
        iterate(run, 0, clip)
    return run


def places_of(way: Way, clip: bool, device: torch.device, **how: Any) -> list[str]:
    run = started(way, clip, device, **how)
    return run_until(None, lambda: iterate(run, 1, clip))


def weights_of(run: Run) -> list[torch.Tensor]:
    return [param.detach().clone() for param in run.params]


def check(way: Way, clip: bool, at: int, device: torch.device, **how: Any) -> None:
    run, other = started(way, clip, device, **how), started(way, clip, device, **how)
    before, numbers = weights_of(run), run.numbers()
    iterate(other, 1, clip)
    place = run_until(at, lambda: iterate(run, 1, clip))[-1]
    if way.has("whole steps or none"):
        is_taken = not all(map(torch.equal, run.params, before))
        assert_same(run.numbers(), other.numbers() if is_taken else numbers)
    run.model.zero_grad()
    if hasattr(run, "scaler"):
        with contextlib.suppress(AssertionError):  # Perhaps nothing was measured yet.
            run.scaler.update()
    before = weights_of(run)
    try:
        for number in range(2, 5):
            iterate(run, number, clip)
    except Exception as error:
        raise AssertionError(f"after a Ctrl-C at {place}") from error
    after = weights_of(run)
    assert not any(map(torch.equal, before, after)), place
    assert all(param.isfinite().all() for param in after), place


@ways_with()
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_training_goes_on_after_a_ctrl_c(clip: bool, way: Way, device: torch.device) -> None:
    places = range(len(places_of(way, clip, device)))
    for at in random.Random(f"{way} {clip}").sample(places, _DRAWN):
        check(way, clip, at, device)


# --- Where it was found: in a window of microseconds.

FOUND = {
    Way("GradScaler", "split", "FusedAdam"): (
        "Iteration.clip_in_step line",
        "Iteration.clip_in_step return",
    ),
    Way("GradScaler", "whole", "RMSprop"): ("__stepping line",),
    Way("O2", "O2", "SGD"): (
        "OptimizerMasters.end_block call",
        "_open_blocks line",
        "_open_blocks return",
    ),
}


@pytest.mark.parametrize("way", FOUND, ids=str)
def test_where_a_ctrl_c_once_ended_all_training(way: Way, device: torch.device) -> None:
    places = places_of(way, True, device)
    for found in FOUND[way]:
        reached = [at for at, place in enumerate(places) if place.endswith(found)]
        assert reached, found
        for at in reached:
            check(way, True, at, device)


def test_a_first_step_is_whole_or_not_taken(device: torch.device) -> None:
    """The state of a step that had been taken was once removed."""
    way = Way("GradScaler", "whole", "FusedAdam")
    places = places_of(way, True, device, steps=0)
    inside = [at for at, place in enumerate(places) if place.startswith("engine/engine.py")]
    assert len(inside) > 50
    for at in inside:
        check(way, True, at, device, steps=0)
