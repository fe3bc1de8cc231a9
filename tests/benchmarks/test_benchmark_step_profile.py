"""What benchmarks.step reads from the events of torch.profiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from benchmarks import step_cases, step_device, step_profile

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

CASES = {case.name: case for case in (*step_cases.CASES, *step_cases.REPLAYED)}


def event(name: str, start: float, end: float, *, on_device: bool = False) -> SimpleNamespace:
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    return SimpleNamespace(name=name, device_type=kind, time_range=Interval(start, end))


# Two steps of a case, at 100 and 200 us, each of two kernels, and one of another; what belongs to
# none stands beside them.
TRACE = [
    event("void fill<float>(float*)", 50, 60, on_device=True),
    event("cudaDeviceSynchronize", 55, 61),
    *(
        each
        for at in (100, 200)
        for each in (
            event(step_device.WHOLE + "ours fp16", at, at + 80),
            event(step_device.STEP + "ours fp16", at, at + 20),
            event(step_device.STEP + "ours fp16", at + 5, at + 75, on_device=True),
            event("aten::add_", at + 1, at + 2),
            event("cudaLaunchKernel", at + 2, at + 3),
            event("cudaLaunchKernelExC", at + 4, at + 5),
            event("cuLaunchKernelEx", at + 4, at + 4.5),
            event("cudaStreamSynchronize", at + 8, at + 18),
            event("cudaMemcpyAsync", at + 7, at + 8),
            event(
                "void apex_mp::cuda::chunks_kernel<c10::Half>(x)", at + 5, at + 15, on_device=True
            ),
            event(
                "void apex_mp::cuda::step_kernel<c10::Half>(x)", at + 30, at + 70, on_device=True
            ),
            event("Memcpy DtoH (Device -> Pageable)", at + 71, at + 72, on_device=True),
            event("cudaDeviceSynchronize", at + 21, at + 80),
        )
    ),
    event(step_device.WHOLE + "other", 300, 380),
    event(step_device.STEP + "other", 300, 320),
    event("cudaLaunchKernel", 301, 302),
    event("cudaLaunchKernel", 303, 304),
    event("fill", 305, 307, on_device=True),
    event("Memset (Device)", 308, 309, on_device=True),
]


def test_a_profile_counts_what_the_steps_do_and_not_what_the_benchmark_does():
    profile = step_profile.summaries(TRACE, steps=2)["ours fp16"]
    step_profile.add_speeds(profile["kernels"], CASES["ours fp16"], 1_000_000)
    assert profile == {
        "steps": 2,
        "launches": 2.0,
        "synchronizations": 1.0,
        "pageable_copies": 1.0,
        "calls": {
            "cudaLaunchKernel": 1.0, "cudaLaunchKernelExC": 1.0, "cudaMemcpyAsync": 1.0,
            "cudaStreamSynchronize": 1.0,
        },
        "kernels_lost": 0.0,
        "kernels_ms": pytest.approx(0.051),
        "kernels": [
            # 28 bytes for each of a million parameters in 40 us, and 2 bytes in 10 us.
            {"name": "void apex_mp::cuda::step_kernel<c10::Half>(x)", "count": 1.0,
             "ms": pytest.approx(0.04), "GB_per_s": pytest.approx(700.0)},
            {"name": "void apex_mp::cuda::chunks_kernel<c10::Half>(x)", "count": 1.0,
             "ms": pytest.approx(0.01), "GB_per_s": pytest.approx(200.0)},
            {"name": "Memcpy DtoH (Device -> Pageable)", "count": 1.0,
             "ms": pytest.approx(0.001)},
        ],
    }  # fmt: skip
