"""The workloads of benchmarks.step, and its cases: peers do the work that ours does."""

from __future__ import annotations

import pytest
import torch

from benchmarks import step_cases
from benchmarks.step_arena import Arena, Case

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

SHAPES = [(40, 30), (30,), (7, 3, 3)]
NAMED = {case.name: case for case in step_cases.CASES}


def test_no_gradient_is_zero_or_subnormal_in_any_dtype():
    arena = Arena(SHAPES, "cpu")
    arena.fill_grads(1.0)
    for grads in (arena.half_grads, arena.bfloat_grads, arena.grads):
        assert all(grad.abs().min() > torch.finfo(grad.dtype).tiny for grad in grads)
    assert any((grad < 0).any() for grad in arena.grads)


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
        ["half"]
        if "fp16" in ours
        else ["bfloat", "bfloat_masters"]
        if "bf16" in ours
        else ["weights"]
    )
    for which in lists:
        untouched = getattr(Arena(SHAPES, "cpu"), which)
        for a, b, before in zip(getattr(peer, which), getattr(own, which), untouched, strict=True):
            # Half an ulp may fall to either side where a master is rounded.
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=max(eps, 2e-6), atol=0.0)
            assert a.dtype != torch.float32 or not torch.equal(a, before)


def test_bytes_are_those_of_the_passes():
    assert {case.name: case.bytes for case in NAMED.values()} == {
        "ours fp16": 30,
        "plain torch fp16, foreach": 48,
        "plain torch fp16, per tensor": 58,
        "ours fp16, clip": 30,
        "plain torch fp16, foreach, clip": 60,
        "plain torch fp16, per tensor, clip": 70,
        "ours bf16": 30,
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
