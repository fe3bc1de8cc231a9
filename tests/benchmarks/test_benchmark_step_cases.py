"""The workloads of benchmarks.step, and its cases: peers do the work that ours does."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import step as benchmark
from benchmarks import step_arena, step_cases, step_timing
from benchmarks.step_arena import SCALE, Arena, Case
from benchmarks.step_device import Stub
from benchmarks.step_shapes import WORKLOADS

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

SHAPES = [(40, 30), (30,), (7, 3, 3)]
NAMED = {case.name: case for case in step_cases.CASES}
ON_GPUS = NAMED | {case.name: case for case in step_cases.REPLAYED}


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("ResNet-50", 161, 25_557_032),
        ("BERT-base", 199, 109_482_240),
        ("BERT-large", 391, 335_141_888),
        ("GPT-2-medium", 292, 354_823_168),
        ("1 x 100M", 1, 100_000_000),
        ("1000 x 1024", 1000, 1_024_000),
        ("2000 x 64", 2000, 128_000),
        ("10000 x 64", 10_000, 640_000),
        ("100 x 10M", 100, 1_000_000_000),
        ("1 x 1000M", 1, 1_000_000_000),
    ],
)
def test_each_workload_has_the_parameters_of_its_model(name, tensors, parameters):
    (workload,) = [each for each in WORKLOADS if each.name == name]
    assert (len(workload.shapes), workload.parameters) == (tensors, parameters)


def test_a_gpu_starts_with_the_workloads_that_tell_most():
    args = benchmark.parse_args(["--device=cuda"])
    assert [each.name for each in benchmark.workloads_of(args)] == [
        "BERT-large", "ResNet-50", "1 x 1000M", "10000 x 64", "100 x 10M", "1000 x 1024",
    ]  # fmt: skip


def test_the_workloads_for_a_cpu_leave_out_those_of_gpus():
    args = benchmark.parse_args(["--device=cpu"])
    assert [each.name for each in benchmark.workloads_of(args)] == [
        "ResNet-50", "BERT-base", "GPT-2-medium", "1 x 100M", "1000 x 1024", "2000 x 64",
    ]  # fmt: skip


def test_no_gradient_is_zero_or_subnormal_in_any_dtype():
    arena = Arena(SHAPES, "cpu")
    arena.fill_grads(1.0)
    for grads in (arena.half_grads, arena.bfloat_grads, arena.grads):
        assert all(grad.abs().min() > torch.finfo(grad.dtype).tiny for grad in grads)
    assert any((grad < 0).any() for grad in arena.grads)


def test_gradients_that_come_in_leave_nothing_in_a_trace():
    params, grads = [torch.nn.Parameter(torch.ones(3))], [torch.ones(3)]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step_arena.bring_in(params, grads)
    assert list(profiler.events()) == []
    assert params[0].grad is not grads[0]
    assert params[0].grad.data_ptr() == grads[0].data_ptr()


def after_steps(case: Case, steps: int = 4) -> Arena:
    arena = Arena(SHAPES, "cpu")
    running = case.build(arena)
    for _ in range(steps):
        running.prepare()
        running.step()
    return arena


# Each case of torch, and the one of ours that does the same work.
PAIRS = [(case.name, case.ours) for case in NAMED.values() if case.name != case.ours]


@pytest.mark.parametrize(("name", "ours"), PAIRS)
def test_a_peer_does_the_work_of_ours(name, ours):
    peer, own = after_steps(NAMED[name]), after_steps(NAMED[ours])
    lists = ["exp_avgs", "exp_avg_sqs"]
    lists += (
        ["half"] if "fp16" in ours else ["bfloat", "weights"] if "bf16" in ours else ["weights"]
    )
    for which in lists:
        untouched = getattr(Arena(SHAPES, "cpu"), which)
        for a, b, before in zip(getattr(peer, which), getattr(own, which), untouched, strict=True):
            # Half an ulp may fall to either side where a master is rounded.
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=max(eps, 2e-6), atol=0.0)
            assert a.dtype != torch.float32 or not torch.equal(a, before)


@pytest.mark.parametrize("ours", [step_cases.FP16, step_cases.SCALED])
def test_clipping_clips(ours):
    plain, clipped = after_steps(NAMED[ours], 1), after_steps(NAMED[f"{ours}, clip"], 1)
    norm = math.hypot(*[float(grad.float().norm()) / SCALE for grad in plain.half_grads])
    assert norm > 1.1 * 0.01
    for a, b in zip(plain.exp_avgs, clipped.exp_avgs, strict=True):
        torch.testing.assert_close(a * (0.01 / norm), b, rtol=1e-3, atol=0.0)


def test_the_monitor_of_a_case_hears_of_its_steps_alone(monkeypatch):
    heard = []
    monkeypatch.setattr(step_cases.Monitor, "after_step", lambda self, note: heard.append(note))
    arena = Arena(SHAPES, "cpu")
    watched = step_cases.our_scaler_clip_monitor(arena)
    for case in (watched, step_cases.our_scaler_clip(arena), watched):
        case.prepare()
        case.step()
    assert len(heard) == 2
    assert all(note.scaled_norm > 0.0 for note in heard)


def test_all_cases_on_one_arena_leave_finite_numbers_after_many_steps():
    arena = Arena(SHAPES, "cpu")
    running = {name: step_timing.start(case, arena, Stub()) for name, case in ON_GPUS.items()}
    for _ in range(30):
        for case in running.values():
            case.prepare()
            case.step()
    for tensor in [*arena.weights, *arena.half, *arena.bfloat, *arena.exp_avgs, *arena.grads]:
        assert tensor.isfinite().all()


def test_bytes_are_those_of_the_passes():
    assert {case.name: case.bytes for case in NAMED.values()} == {
        "ours fp16": 30,
        "plain torch fp16, foreach": 48,
        "plain torch fp16, per tensor": 58,
        "ours fp16, clip": 30,
        "plain torch fp16, foreach, clip": 60,
        "plain torch fp16, per tensor, clip": 70,
        "ours bf16": 28,
        "plain torch bf16, foreach": 40,
        "ours fp32, GradScaler": 40,
        "ours fp32, GradScaler, only reads": 36,
        "GradScaler + torch fused": 40,
        "ours fp32, GradScaler, clip": 44,
        "GradScaler + clip + torch fused": 48,
        "ours fp32, our GradScaler": 36,
        "ours fp32, our GradScaler, clip": 36,
        "our GradScaler + clip + torch fused": 36,
        "ours fp32, our GradScaler, unscale_, clip": 48,
        "ours fp32, our GradScaler, clip, monitor": 36,
        "ours fp32": 28,
        "torch AdamW, fused": 28,
        "torch AdamW, foreach": 28,
    }
