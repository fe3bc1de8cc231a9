"""Two processes, each with half of every batch, train as one process with all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_cases import ARGUMENTS, USES
from tolerances import FP16_TRAINING
from torch import Tensor
from torch import distributed as dist
from two_process_cases import (
    BAD_STEP,
    JOINING,
    KEPT,
    STEPS,
    WAYS,
    WORLD,
    runs,
    train,
    work,
)

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

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


@every_run
def test_weights_are_the_rounded_masters_after_each_step(
    way: str, accumulation: str | None, found: list[dict[Any, Any]]
) -> None:
    for rank in range(WORLD):
        assert found[rank][way, accumulation]["rounded"] == [True] * STEPS


@pytest.mark.parametrize("way", [way for way in WAYS if f"{way}, torch's DDP" in WAYS])
@pytest.mark.parametrize("accumulation", [None, "no_sync"])
def test_torchs_distributed_data_parallel_comes_to_the_same_bits(
    way: str, accumulation: str | None, found: list[dict[Any, Any]]
) -> None:
    ours = found[0][way, accumulation]
    theirs = found[0][f"{way}, torch's DDP", accumulation]
    assert all(map(torch.equal, ours["end"], theirs["end"]))
    assert ours["scales"] == theirs["scales"]


# The arguments of DistributedDataParallel.


@pytest.fixture
def probes(found: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    return [each["probes"] for each in found]


def by_both(probes: list[dict[Any, Any]], key: Any) -> list[Any]:
    return [each[key] for each in probes]


# Where they are not the averages of 1 and 2, and of 40000 and 40000.
GRADIENTS = {
    "gradient_average": 3.0,
    "gradient_predivide_factor, no average": 0.75,
    "gradient_average_split_factor": 0.75,
}
LARGE_GRADIENTS = {
    "gradient_average": float("inf"),  # 80000 in float16
    "gradient_predivide_factor, no average": 20000.0,
    "gradient_average_split_factor": 20000.0,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_are_averaged_as_the_arguments_say(
    name: str, probes: list[dict[Any, Any]]
) -> None:
    assert by_both(probes, ("gradient", name)) == [GRADIENTS.get(name, 1.5)] * WORLD


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_pickled_model_keeps_its_arguments(name: str, probes: list[dict[Any, Any]]) -> None:
    assert by_both(probes, ("copy", name)) == [GRADIENTS.get(name, 1.5)] * WORLD


@pytest.mark.parametrize("name", ARGUMENTS)
def test_halves_overflow_in_a_sum_but_not_in_an_average(
    name: str, probes: list[dict[Any, Any]]
) -> None:
    assert by_both(probes, ("large", name)) == [LARGE_GRADIENTS.get(name, 40000.0)] * WORLD


def test_reduction_is_switched_between_forward_and_backward(probes: list[dict[Any, Any]]) -> None:
    one, other = by_both(probes, "switched_between_forward_and_backward")
    assert one == [1.0, 3.0, 4.0, 6.0]  # here alone, then the average of the sums, and once more
    assert other == [2.0, 3.0, 5.0, 6.0]


def test_two_backwards_of_one_forward_add_up_where_nothing_is_sent(
    probes: list[dict[Any, Any]],
) -> None:
    one, other = by_both(probes, "two_backwards_of_one_forward")
    assert one == [2.0, 4.5]
    assert other == [4.0, 4.5]


def test_a_reducer_averages_as_torchs_all_reduce_does(probes: list[dict[Any, Any]]) -> None:
    for found in by_both(probes, "averages_of_a_model"):
        assert all(map(torch.equal, found["ours"], found["torch's"]))
        assert all(
            map(torch.equal, found["params"], by_both(probes, "averages_of_a_model")[0]["params"])
        )


def test_processes_that_share_a_dtensor_skip_its_step_together(
    probes: list[dict[Any, Any]],
) -> None:
    expected = [True, [[1.0, 1.0]], False, [[0.5, 0.5]]]
    assert by_both(probes, "overflow_in_one_shard") == [expected] * WORLD


@pytest.mark.parametrize("use", [use.__name__ for use in USES])
def test_gradients_are_averaged_however_the_model_is_used(
    use: str, probes: list[dict[Any, Any]]
) -> None:
    assert by_both(probes, use) == [[1.5] * 4] * WORLD


@pytest.mark.parametrize("way", JOINING)
def test_a_join_ends_with_the_masters_and_scales_of_the_process_that_took_most_steps(
    way: str, probes: list[dict[Any, Any]]
) -> None:
    fewer, more = by_both(probes, ("joined", way))
    masters, scale = more["before"]
    assert fewer["before"][1] != scale
    for each in (fewer, more):
        assert all(map(torch.equal, each["after"][0], masters))
        assert all(map(torch.equal, each["model"], more["model"]))
        assert each["after"][1] == scale


@pytest.mark.parametrize("name", KEPT)
def test_a_join_ends_with_the_masters_beside_an_optimizer_to_the_digit(
    name: str, probes: list[dict[Any, Any]]
) -> None:
    none, more = by_both(probes, "kept_masters")
    before, after = more[name]
    assert not any(torch.equal(each, each.bfloat16().float()) for each in before)
    assert not any(map(torch.equal, none[name][0], before))
    for each in (after, none[name][1]):
        assert all(map(torch.equal, each, before))


def test_masters_of_an_own_seed_give_way_to_the_weights_that_are_broadcast(
    probes: list[dict[Any, Any]],
) -> None:
    first, second = by_both(probes, "originals_of_own_seed")
    count = len(first) // 2
    assert all(map(torch.equal, first[:count], second[:count]))
    assert all(map(torch.equal, second[:count], second[count:]))  # Digits of another seed are gone.


def test_masters_of_one_process_only_are_refused_in_all(probes: list[dict[Any, Any]]) -> None:
    for rank, sentence in enumerate(by_both(probes, "masters_in_one_process_only")):
        assert f"this process has float32 masters with {2 - 2 * rank} elements" in sentence
