"""Our GradScaler and fused optimizers train what FSDP2 shards, ZeRO too; the rest is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import (
    BAD_STEP,
    CASES,
    EXPERTS,
    STEPS,
    WORLD,
    ZERO_THAT_CLIPS,
    fully_sharded,
    fused,
    misfit_of_the_last,
    work,
    zero,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu_only,
    # Some have no masters, which the scaler warns of once.
    pytest.mark.filterwarnings("ignore:GradScaler. (AdamW|FusedSGD) steps .* no float32 masters"),
]

ALONE = {
    "fp16": lambda: fully_sharded(torch.float16, 0, 1),
    "fp32 fused": lambda: fully_sharded(torch.float32, 0, 1, fused=True),
    "zero": lambda: zero(0, 1),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", ALONE)
def test_shards_train_as_one_process_and_skip_together(
    way: str, found: list[dict[str, Any]]
) -> None:
    alone = ALONE[way]()
    for rank in range(WORLD):
        run = found[rank][way]
        assert run["moved"] == [step != BAD_STEP for step in range(STEPS)]
        assert run["scales"] == alone["scales"]
        # Gradients of two halves are rounded to float16 before they are added.
        tolerance = 2.0**-9 if way == "fp16" else 1e-6
        torch.testing.assert_close(
            run["norms"], alone["norms"], rtol=tolerance, atol=0, equal_nan=True
        )
        for param, other in zip(run["params"], alone["params"], strict=True):
            torch.testing.assert_close(param, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join(map(str, c)) for c in CASES])
def test_fused_optimizers_step_dtensors_as_whole_tensors(
    case: int, found: list[dict[str, Any]]
) -> None:
    alone = fused(case, 0, 1)
    dtype = CASES[case][1]
    for rank in range(WORLD):
        run = found[rank]["fused"][case]
        assert run["kinds"] == {"DTensor"}
        # Gradients of two halves are rounded to their dtype before they are added.
        tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        if "scales" in alone:
            assert run["moved"] == [step != BAD_STEP for step in range(STEPS)]
            assert run["scales"] == alone["scales"]
            torch.testing.assert_close(
                run["norms"], alone["norms"], rtol=2 * tolerance, atol=0, equal_nan=True
            )
        for param, other in zip(run["params"], alone["params"], strict=True):
            torch.testing.assert_close(param, other, rtol=tolerance, atol=tolerance)


def test_processes_agree_on_what_each_has_found(found: list[dict[str, Any]]) -> None:
    # Squares of a plain and of a replicated tensor count once, those of both parts add up.
    squares = [2.0, 2 * 10.0**2, 2 * 100.0**2, 2 * 1000.0**2 * (1 + 2**2)]
    for rank in range(WORLD):  # The second has no gradient of the second parameter.
        finite, *others = found[rank]["agreed"]
        assert finite[:2] == [False, False]
        assert finite[2:] == pytest.approx([square**0.5 for square in squares])
        for said in others:
            assert said[:2] == [True, False]
            assert said[-1] == math.inf


def test_a_process_without_gradients_keeps_no_other_waiting(found: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        assert found[rank]["without gradients"] == [rank == 0] * 4


@pytest.mark.parametrize("name", ZERO_THAT_CLIPS)
def test_in_zero_a_step_clips_by_the_norm_of_all_parts(
    name: str, found: list[dict[str, Any]]
) -> None:
    for rank in range(WORLD):
        zero, whole = found[rank]["zero that clips"][name]
        torch.testing.assert_close(zero, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_clip_is_by_the_norm_of_the_whole_model_where_processes_have_other_experts(
    kind: str, found: list[dict[str, Any]]
) -> None:
    for rank in range(WORLD):
        norm, expected = found[rank]["experts"][kind]
        assert norm == pytest.approx(expected, rel=1e-6)


def test_gradients_that_are_sums_in_parts_are_added_up(found: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        fused, masters, *whole = found[rank]["sum in parts"]
        assert torch.equal(fused, whole[0])
        assert torch.equal(masters, whole[1])
        assert not torch.equal(fused, torch.ones(4).half())


def test_masters_inside_zero_reach_weights_in_buckets(found: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        plain, in_buckets, said = found[rank]["zero in buckets"]
        assert torch.equal(in_buckets, plain)
        assert torch.equal(in_buckets, found[0]["zero in buckets"][1])
        assert "parameters_as_bucket_view of this ZeroRedundancyOptimizer is True" in said


def test_a_hook_that_edits_gradients_of_one_process_after_a_clip_keeps_no_other_waiting(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["hooks"] == pytest.approx([1.0, 1.0, 1.0], rel=1e-5)
    edited, dropped, inf = found[1]["hooks"]
    assert (edited, dropped) == pytest.approx((2.0, 0.0), rel=1e-5)
    assert inf.startswith("FusedSGD: in this process gradients got inf or NaN after ")


def test_a_process_without_gradients_skips_and_backs_off_with_the_others(
    found: list[dict[str, Any]],
) -> None:
    for rank in range(WORLD):
        assert found[rank]["overflow of another"] == [128.0, True] * 2


def test_processes_that_do_not_fit_each_other_refuse_the_first_step(
    found: list[dict[str, Any]],
) -> None:
    for rank in range(WORLD):
        scales, order = found[rank]["misfits"]
        expected = f"{2.0**8} in rank 0 and {2.0**9} in rank 1"
        assert scales.startswith(f"the loss scale is {expected}. Processes that")
        shapes = ("[17, 6]", "[1]")
        here, there = (f"{shapes[each]} in torch.float16 in rank {each}" for each in (0, 1))
        assert order.startswith(f"parameter 0 is {here} and {there}")


def test_all_processes_refuse_what_one_of_them_has_in_a_mesh_of_two_dimensions(
    tmp_path: Path,
) -> None:
    torch.multiprocessing.spawn(misfit_of_the_last, args=(str(tmp_path),), nprocs=4)  # type: ignore[no-untyped-call]
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)]
    assert said[0].startswith("the loss scale is 4.0 in rank 0 and 8.0 in rank 3. Processes that")
    assert said == [said[0]] * 4
