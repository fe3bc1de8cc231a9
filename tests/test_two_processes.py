"""Two processes, each with half of every batch, train as one process with all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tolerances import FP16_TRAINING
from torch import Tensor
from torch import distributed as dist
from two_process_cases import BAD_STEP, STEPS, WORLD, runs, train, work

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

RUNS = runs()
every_run = pytest.mark.parametrize(
    ("way", "accumulation"), RUNS, ids=[f"{way}-{how or 'each'}" for way, how in RUNS]
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def found_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Any]]:
    store = tmp_path_factory.mktemp("one") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield {}
    dist.destroy_process_group()


@pytest.fixture
def alone(way: str, accumulation: str | None, found_alone: dict[Any, Any]) -> dict[str, Any]:
    """The same, by one process that has all of every batch."""
    if (way, accumulation) not in found_alone:
        found_alone[way, accumulation] = train(way, 0, 1, accumulation)
    return found_alone[way, accumulation]


def norm(tensors: list[Tensor]) -> float:
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm().item()


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return norm([a.double() - b.double() for a, b in zip(one, other, strict=True)])


@every_run
def test_all_ranks_skip_the_step_in_which_one_has_an_inf(
    way: str, accumulation: str | None, found: list[dict[Any, Any]]
) -> None:
    for rank in range(WORLD):
        moved = found[rank][way, accumulation]["moved"]
        assert moved == [step != BAD_STEP for step in range(STEPS)]


@every_run
def test_scales_go_the_same_way_in_all_ranks_and_in_one(
    way: str, accumulation: str | None, found: list[dict[Any, Any]], alone: dict[str, Any]
) -> None:
    for rank in range(WORLD):
        assert found[rank][way, accumulation]["scales"] == alone["scales"]
    before, after = alone["scales"][BAD_STEP - 1 : BAD_STEP + 1]
    assert after < before
    assert alone["scales"][-1] > after


@every_run
def test_gradients_are_those_of_the_joined_batch(
    way: str, accumulation: str | None, found: list[dict[Any, Any]], alone: dict[str, Any]
) -> None:
    mine, other = (found[rank][way, accumulation]["grads"] for rank in range(WORLD))
    assert all(map(torch.equal, mine, other))
    assert distance(mine, alone["grads"]) < FP16_TRAINING.weights * norm(alone["grads"])


@every_run
def test_all_ranks_end_with_the_same_weights_and_near_those_of_one(
    way: str, accumulation: str | None, found: list[dict[Any, Any]], alone: dict[str, Any]
) -> None:
    mine, other = (found[rank][way, accumulation]["end"] for rank in range(WORLD))
    assert all(map(torch.equal, mine, other))
    bound = FP16_TRAINING.weights * distance(alone["end"], alone["start"])
    assert distance(mine, alone["end"]) < bound
