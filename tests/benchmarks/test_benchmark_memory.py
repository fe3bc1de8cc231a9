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
from benchmarks.step_arena import MAX_NORM, OPTIONS, SCALE, Case, Running, bring_in, parameters
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
    return Running(lambda: bring_in([*single, *half], grads), optimizer.step)


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
    "ours bf16, split": (2, 2, 2, 8),
    "ours bf16, split, bf16 moments": (2, 2, 2, 4),
    "ours bf16, split, bf16 moments, stochastic": (2, 2, 2, 4),
    "torch AdamW, for-loop": (4, 4, 0, 8),
}


def test_the_table_of_what_is_held_has_every_case():
    assert [*HOLDS] == [case.name for case in CASES]


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
    assert first.after >= HOLDS.get(name, HOLDS["ours fp16"])[3]  # moments, of bf16 masters too
    assert first.peak - first.after < NOTHING
    for _ in range(2):
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


def test_a_temporary_inside_fused_adam_is_seen(device, monkeypatch):
    def step(self, *args, plain=FusedAdam.step, **kwargs):
        grads = [param.float() + 0.0 for group in self.param_groups for param in group["params"]]
        assert grads
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(FusedAdam, "step", step)
    row = benchmark.measure_case(NAMED["ours fp32"], WORKLOAD, rounds=1, device=device.type)
    assert row["step"] == pytest.approx(4.0, abs=NOTHING)


def test_what_is_kept_and_what_is_given_back_are_told_apart(device):
    kept = []

    def work() -> None:
        kept.append(torch.ones(1 << 20, device=device))
        torch.ones(1 << 19, device=device)
        torch.ones(1 << 18, device=device)

    assert memory_probe.allocated(work, device.type) == (6 << 20, 4 << 20)


@pytest.mark.cpu_only
def test_what_frees_first_and_allocates_then_is_counted_in_full():
    tensors = [torch.ones(1 << 20)]

    def work() -> None:
        tensors.clear()
        tensors.append(torch.ones(1 << 20))

    assert memory_probe.allocated(work, "cpu") == (4 << 20, 4 << 20)


@pytest.mark.cpu_only
@pytest.mark.skipif(not memory_probe.can_see_resident(), reason="needs /proc/self/clear_refs")
def test_the_resident_set_shows_what_torchs_allocator_does_not():
    size = 64 << 20  # glibc maps and unmaps blocks of this size whatever came before

    def work() -> None:
        assert b"x" * size

    assert memory_probe.allocated(work, "cpu").peak == 0
    for _ in range(2):
        assert memory_probe.resident(work).peak == pytest.approx(size, rel=0.05)
    assert memory_probe.resident(lambda: None).peak < size / 50


def test_memory_is_counted_where_it_is_met_first():
    one, other = torch.ones(10), torch.ones(3)
    counted = memory_probe.by_storage({"a": [one[2:], one], "b": [one.view(2, 5), other]})
    assert counted == {"a": 40, "b": 12}


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


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "benchmarks/results"),
        (["--quick"], "build/bench"),
        (["--quick", "--results", "here"], "here"),
    ],
)
def test_only_a_whole_run_goes_beside_the_published_results(arguments, folder):
    args = benchmark.parse_args(["--device=cpu", *arguments])
    path = benchmark.place_of(args, {"device": "NVIDIA H200"})
    assert path.as_posix().endswith(f"{folder}/memory-nvidia-h200.json")


# --- What is said


def row(case: str, masters: float, skipped: float | None, resident: float | None) -> dict:
    return {
        "case": case,
        "held": {"weights": 2.0, "gradients": 2.00004, "masters": masters, "moments": 8.00001},
        "first_step": 8.0, "step": masters / 2, "skipped_step": skipped,
        "step_resident": resident,
    }  # fmt: skip


FIXED = {
    "workload": "small", "tensors": 2, "parameters": 2_000_000,
    "rows": [row("ours bf16", 0.0, 0.0, 0.014), row("torch's", 4.0, None, None),
             row("torch's, more", 5.0, 1.0, None)],
}  # fmt: skip

TABLE = """\
small: 2.00 M parameters in 2 tensors; bytes a parameter

| case          | weights | gradients | masters | moments | held | first step | step | skipped step | step, resident |
| ------------- | ------: | --------: | ------: | ------: | ---: | ---------: | ---: | -----------: | -------------: |
| ours bf16     |     2.0 |       2.0 |         |     8.0 | 12.0 |       8.00 | 0.00 |         0.00 |           0.01 |
| torch's       |     2.0 |       2.0 |     4.0 |     8.0 | 16.0 |       8.00 | 2.00 |              |                |
| torch's, more |     2.0 |       2.0 |     5.0 |     8.0 | 17.0 |       8.00 | 2.50 |         1.00 |                |"""  # noqa: E501

FINDING = """\
- held: ours 12.00 in every case; torch's 16.00 to 17.00 (torch's, more; small)
- a step: ours 0.00 in every case; torch's 2.00 to 2.50 (torch's, more; small)
- a skipped step: ours 0.00 in every case; torch's 1.00 in every case"""


def test_the_table_says_what_was_measured():
    assert memory_report.table(FIXED) == TABLE
    assert memory_report.finding({"workloads": [FIXED]}) == FINDING


def test_the_published_run_was_whole_and_its_two_ways_of_looking_agree():
    results = json.loads(RESULTS.read_text())
    names = [workload.name for workload in benchmark.WORKLOADS]
    assert [each["workload"] for each in results["workloads"]] == names
    for workload in results["workloads"]:
        assert [row["case"] for row in workload["rows"]] == [*HOLDS]
        for row in workload["rows"]:
            assert [*row["held"].values()] == pytest.approx(HOLDS[row["case"]], abs=0.001)
            assert row["step_resident"] == pytest.approx(row["step"], abs=0.15)
            assert row["step"] < 0.01 or not row["case"].startswith("ours")
