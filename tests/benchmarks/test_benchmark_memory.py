"""benchmarks.memory sees what is allocated, and ours allocates nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from apex_mp.optimizers import FP16_Optimizer, FusedAdam
from benchmarks import memory as benchmark
from benchmarks import memory_probe, memory_report
from benchmarks.memory_cases import CASES, QUICK, OwnArena, build, overflow
from benchmarks.memory_probe import HELD
from benchmarks.step_arena import MAX_NORM, OPTIONS, SCALE, Case, Running, give_grads, parameters
from benchmarks.step_shapes import Workload

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "memory-cpu.json"

pytestmark = [pytest.mark.any_torch]

SHAPES = [(600, 500), (500,), (300, 1000), (1000, 3, 3), (400_000,)]
PARAMETERS = sum(map(math.prod, SHAPES))
LARGEST = 400_000 / PARAMETERS
WORKLOAD = Workload("mixed", lambda: iter(SHAPES))
# Bytes a parameter. Far below 1, a byte for each, which is the least that a temporary of the
# model's size takes; above it what does not grow with the model.
NOTHING = 0.02


def in_groups(arena: OwnArena) -> Running:
    """FP16_Optimizer around FusedAdam with three groups, one of them in fp32, all clipped."""
    single, half = parameters([arena.half[0].float()]), parameters(arena.half[1:])
    groups = [{"params": half[:2]}, {"params": half[2:], "weight_decay": 0.0}, {"params": single}]
    inner = FusedAdam(groups, max_grad_norm=MAX_NORM, **OPTIONS)
    optimizer = FP16_Optimizer(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": SCALE},
        verbose=False,
    )
    assert optimizer.loss_scale == SCALE
    arena.share_moments(inner)
    grads = [arena.half_grads[0].float(), *arena.half_grads[1:]]
    return Running(lambda: give_grads([*single, *half], grads), optimizer.step)


IN_GROUPS = Case("ours fp16, in groups", "", (), in_groups)
NAMED = {case.name: case for case in (*CASES, IN_GROUPS)}
OURS = [name for name in NAMED if name.startswith("ours")]


def stand(name: str, device: torch.device) -> tuple[OwnArena, Running]:
    arena = OwnArena(SHAPES, device.type)
    return arena, build(NAMED[name], arena)


def extra(running: Running, device: torch.device) -> memory_probe.Extra:
    """Bytes a parameter that a step takes, at its peak and after it."""
    running.prepare()
    peak, after = memory_probe.allocated(running.step, device.type)
    return memory_probe.Extra(peak / PARAMETERS, after / PARAMETERS)


# --- What ours holds and takes

HOLDS = {
    "ours fp16": (2, 2, 4, 8),
    "plain torch fp16, foreach": (2, 2 + 4, 4, 8),
    "plain torch fp16, per tensor": (2, 2 + 4, 4, 8),
    "ours fp16, clip": (2, 2, 4, 8),
    "plain torch fp16, foreach, clip": (2, 2 + 4, 4, 8),
    "plain torch fp16, per tensor, clip": (2, 2 + 4, 4, 8),
    "ours bf16": (2, 2, 4, 8),
    "plain torch bf16, foreach": (2, 2 + 4, 4, 8),
    "ours fp32, GradScaler": (4, 4, 0, 8),
    "GradScaler + torch fused": (4, 4, 0, 8),
    "ours fp32, GradScaler, clip": (4, 4, 0, 8),
    "GradScaler + clip + torch fused": (4, 4, 0, 8),
    "ours fp32": (4, 4, 0, 8),
    "torch AdamW, fused": (4, 4, 0, 8),
    "torch AdamW, foreach": (4, 4, 0, 8),
    "ours fp16, split": (2, 2, 2, 8),
    "ours fp16, split, bf16 moments": (2, 2, 2, 4),
    "ours fp16, split, bf16 moments, stochastic": (2, 2, 2, 4),
    "ours fp16, split, one-byte moments": (2, 2, 2, 2 + 2 / 32),
    "ours bf16, split": (2, 2, 2, 8),
    "ours bf16, split, bf16 moments": (2, 2, 2, 4),
    "ours bf16, split, bf16 moments, stochastic": (2, 2, 2, 4),
    "ours bf16, split, one-byte moments": (2, 2, 2, 2 + 2 / 32),
    "MasterWeights(AdamW, fused)": (2, 2, 4, 8),
    "MasterWeights(AdamW, fused), keep_grads": (2, 2 + 4, 4, 8),
    "MasterWeights(AdamW, foreach)": (2, 2, 4, 8),
    "MasterWeights(AdamW, fused), split": (2, 2, 2, 8),
    "torch AdamW, for-loop": (4, 4, 0, 8),
}


@pytest.mark.parametrize("name", HOLDS)
def test_a_case_holds_these_bytes_a_parameter_and_no_others(name, device):
    made = []

    def make() -> None:
        arena, running = stand(name, device)
        made.extend([arena, running])
        for _ in range(2):
            running.prepare()
            running.step()

    alive = memory_probe.allocated(make, device.type).after
    held = made[0].held()
    # Step counts, flags and blocks rounded up are within it.
    for key, expected in zip(HELD, HOLDS[name], strict=True):
        assert held[key] / PARAMETERS == pytest.approx(expected, abs=NOTHING)
    # What the allocator has given out since, and has not got back: nothing is held unseen.
    assert alive / PARAMETERS == pytest.approx(sum(HOLDS[name]), abs=NOTHING)


@pytest.mark.parametrize("name", OURS)
def test_no_step_of_ours_makes_a_temporary_of_the_models_size(name, device):
    _, running = stand(name, device)
    first = extra(running, device)
    if device.type == "cpu":  # On a GPU what the step frees is subtracted.
        assert first.after >= HOLDS.get(name, HOLDS["ours fp16"])[3]  # moments, of bf16 masters too
    assert first.peak - first.after < NOTHING
    for _ in range(6):
        later = extra(running, device)
        assert later.peak < NOTHING
        assert later.after < NOTHING


@pytest.mark.parametrize("name", [n for n in OURS if "fp16" in n or "GradScaler" in n])
def test_a_step_after_a_skipped_one_makes_none_either(name, device):
    arena, running = stand(name, device)

    def weights() -> list[Tensor]:
        master = getattr(arena.optimizer, "master", Tensor.detach)
        return [master(param).clone() for param in arena.params]

    extra(running, device)
    running.prepare()
    with overflow(arena):
        before = weights()
        skipped = memory_probe.allocated(running.step, device.type)
        assert all(map(torch.equal, before, weights()))
    # To say where it was takes a mask and its sum in int64 of some elements at a time.
    at_once = (1 << 16) / PARAMETERS if device.type == "cpu" else LARGEST
    assert skipped.peak / PARAMETERS <= 9 * at_once + NOTHING
    assert skipped.after / PARAMETERS < NOTHING
    assert extra(running, device).peak < NOTHING
    assert not all(map(torch.equal, before, weights()))


# --- That the measuring sees


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
def test_a_temporary_of_the_models_size_in_a_step_is_seen(dtype, device):
    def with_a_temporary(arena: OwnArena) -> Running:
        running = NAMED["ours fp16"].build(arena)

        def step() -> None:
            running.step()
            torch.empty(PARAMETERS, dtype=dtype, device=device)

        return Running(running.prepare, step)

    case = Case("ours fp16, wasteful", "", (), with_a_temporary)
    row = benchmark.measure_case(case, WORKLOAD, rounds=1, device=device.type)
    assert row["step"] == pytest.approx(dtype.itemsize, abs=NOTHING)
    assert row["step"] > NOTHING
    assert row["skipped_step"] >= dtype.itemsize


# --- A run


@pytest.mark.slow
@pytest.mark.cpu_only
def test_a_quick_run_measures_every_case_and_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the process that looks at its resident set
    results = benchmark.main(["--device=cpu", "--quick", "--rounds=1", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "memory-cpu.json").read_text()) == results
    assert memory_report.page(results) in capsys.readouterr().out
    assert [each["workload"] for each in results["workloads"]] == [each.name for each in QUICK]
    (workload,) = results["workloads"]
    assert [row["case"] for row in workload["rows"]] == [*HOLDS]
    for row in workload["rows"]:
        looked = "fp16" in row["case"] or "GradScaler" in row["case"]
        assert (row["skipped_step"] is not None) == looked
        assert (row["step_resident"] is not None) == memory_probe.can_see_resident()
        assert row["first_step"] >= HOLDS[row["case"]][3]
    by_name = {row["case"]: row for row in workload["rows"]}
    assert by_name["torch AdamW, foreach"]["step"] == pytest.approx(4.0, abs=NOTHING)
    assert by_name["torch AdamW, for-loop"]["step"] == pytest.approx(12 / 30, abs=NOTHING)


# --- What is said


def test_the_published_run_was_whole_and_its_two_ways_of_looking_agree():
    results = json.loads(RESULTS.read_text())
    names = [workload.name for workload in benchmark.WORKLOADS]
    assert [each["workload"] for each in results["workloads"]] == names
    for workload in results["workloads"]:
        assert [row["case"] for row in workload["rows"]] == [*HOLDS]
        for row in workload["rows"]:
            # Small parameters keep moments in float32.
            near = 0.02 if "one-byte" in row["case"] else 0.001
            assert [*row["held"].values()] == pytest.approx(HOLDS[row["case"]], abs=near)
            assert row["step_resident"] == pytest.approx(row["step"], abs=0.15)
            assert row["step"] < 0.01 or not row["case"].startswith("ours")
