"""benchmarks.step measures what it says, and its peers do the work that ours does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval
from torch.profiler import ProfilerActivity, profile

from benchmarks import step as benchmark
from benchmarks import (
    step_arena,
    step_cases,
    step_device,
    step_machine,
    step_peers,
    step_profile,
    step_report,
    step_timing,
)
from benchmarks.step_arena import SCALE, Arena, Case, Running
from benchmarks.step_device import Cpu, Cuda, Stub
from benchmarks.step_shapes import QUICK, WORKLOADS

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

ROOT = Path(benchmark.__file__).resolve().parents[1]
SHAPES = [(40, 30), (30,), (7, 3, 3)]
NAMED = {case.name: case for case in step_cases.CASES}
ON_GPUS = NAMED | {case.name: case for case in step_cases.REPLAYED}


# --- What is stepped


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


# --- What a case does


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
        "ours fp32": 28,
        "torch AdamW, fused": 28,
        "torch AdamW, foreach": 28,
    }


def test_the_reference_of_a_cpu_reads_and_writes_every_byte_that_it_claims(monkeypatch):
    multiplied = []
    monkeypatch.setattr(torch.Tensor, "mul_", lambda tensor, factor: multiplied.append(tensor))
    reference = step_timing.Reference(Cpu(), 1)
    reference.once()
    (tensor,) = multiplied
    assert reference.bytes == 2 * 2**20 == 2 * tensor.nbytes


def test_the_reference_of_a_gpu_is_a_copy_from_one_place_to_another(monkeypatch):
    copied = []
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda target, source: copied.append((target, source))
    )
    reference = step_timing.Reference(Stub(), 1)
    reference.once()
    ((target, source),) = copied
    assert reference.bytes == 2 * 2**20 == target.nbytes + source.nbytes
    assert target.data_ptr() != source.data_ptr()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(["48K", "2048K", "307200K"], 1200), (["48K", "1024K"], 128), ([], 512)],
)
def test_the_reference_is_larger_than_any_cache(sizes, expected, tmp_path):
    for index, size in enumerate(sizes):
        cache = tmp_path / f"index{index}"
        cache.mkdir()
        (cache / "size").write_text(f"{size}\n")
    assert step_timing.reference_mebibytes("cpu", tmp_path) == expected


def recorded() -> tuple[list[str], Running]:
    calls: list[str] = []
    return calls, Running(lambda: calls.append("prepare"), lambda: calls.append("step"))


@pytest.mark.parametrize(("again", "steps"), [(False, 1), (True, 4)])
def test_only_a_small_model_is_stepped_with_warm_caches(again, steps):
    calls, case = recorded()
    time = step_timing.look(case, 1, step_timing.Reference(Cpu(), 1), again=again)
    assert calls == ["prepare", "step"] * steps
    assert (time.again is not None) == again


class Ticking(Stub):
    """A device whose clock advances by a second at each mark, and which says what it is asked."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.now = calls, 0.0

    def mark(self) -> float:
        self.calls.append("mark")
        self.now += 1.0
        return self.now

    def wait(self) -> None:
        self.calls.append("wait")


def test_a_batch_waits_before_and_after_its_steps_and_times_nothing_between_them():
    calls, case = recorded()
    took, host = step_timing.batch(case, 3, Ticking(calls))
    step = ["mark", "step", "mark"]
    assert calls == ["wait", *step, "prepare", *step, "prepare", *step, "wait"]
    assert took == [1.0, 1.0, 1.0]
    assert len(host) == 3
    assert all(0.0 < each < 1.0 for each in host)


def test_cases_take_turns_in_whole_rounds_that_fit_the_time(monkeypatch):
    # The third round would begin at 9 seconds and end at 12 or so.
    now = iter([0.0, 4.0, 5.0, 8.0, 9.0])
    monkeypatch.setattr(step_timing.time, "monotonic", lambda: next(now))
    _, case = recorded()
    asked = []

    def take(name: str) -> int:
        asked.append(name)
        return len(asked)

    *_, found = step_timing.take_turns({"a": case, "b": case}, 9, 10.0, take)
    assert [sorted(asked[:2]), sorted(asked[2:])] == [["a", "b"], ["a", "b"]]
    assert [[asked[each - 1] for each in found[name]] for name in "ab"] == [["a"] * 2, ["b"] * 2]


# --- A GPU, without one


def test_the_clock_of_a_gpu_is_events_on_the_current_stream(monkeypatch):
    made = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.timed, self.recorded = enable_timing, 0
            made.append(self)

        def record(self) -> None:
            self.recorded += 1

        def elapsed_time(self, end: Event) -> float:
            assert (self, end) == (made[0], made[1])
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = Cuda()
    assert device.seconds(device.mark(), device.mark()) == 0.0025
    assert [(event.timed, event.recorded) for event in made] == [(True, 1), (True, 1)]


def test_what_is_replayed_is_a_graph_of_one_step_with_its_gradients_in_place(monkeypatch):
    calls, case = recorded()

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def capture(graph):
        assert isinstance(graph, Graph)
        calls.append("capture")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    replayed = step_cases.replayed(case, SimpleNamespace(is_cuda=True))
    assert calls == ["prepare", "step"] * 2 + ["prepare", "capture", "step", "end"]
    replayed.prepare()
    replayed.step()
    assert calls[8:] == ["replay"]


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
    step_profile.add_speeds(profile["kernels"], ON_GPUS["ours fp16"], 1_000_000)
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


def test_a_profile_says_if_kernels_were_lost():
    profile = step_profile.summaries(TRACE, steps=1)["other"]
    assert (profile["launches"], profile["kernels_lost"]) == (2.0, 1.0)
    row = {"case": "other", "profile": profile}
    shown = {"workload": "it", "rows": [row], "reference_GB_per_s": {"median": 1.0}}
    assert "| at least 0.003 |" in step_report.profile_table(shown)


def test_the_kernels_of_our_passes_are_there():
    code = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("step_*.cu"))
    kernels = {each.kernel for case in ON_GPUS.values() for each in case.passes if each.kernel}
    assert kernels == {"chunks_kernel", "step_kernel"}
    assert all(f" {kernel}(const" in code for kernel in kernels)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("void apex_mp::cuda::step_kernel<c10::Half>(a::B<c>)", "step_kernel"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<x>(y)",
         "multi_tensor_apply_kernel"),
        ("adam_kernel", "adam_kernel"),
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pageable)"),
    ],
)  # fmt: skip
def test_a_kernel_is_named_without_its_arguments(name, said):
    assert step_report.short(name) == said


def test_parts_of_a_run_share_what_is_left_of_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    box = benchmark.Box(80.0, weight=8)
    assert box.next(3) == 130.0
    now[0] = 105.0  # It took less: 75 seconds and a weight of 5 are left.
    assert box.next(3) == 150.0
    now[0] = 170.0
    assert [box.next(1), box.next(1)] == [175.0, 180.0]
    assert benchmark.Box(math.inf, weight=1).next(1) == math.inf


# --- A run


@pytest.fixture
def no_packages(monkeypatch):
    """Hide the other packages, whatever is installed."""
    monkeypatch.setattr(step_peers, "version", lambda package: None)


@pytest.mark.usefixtures("no_packages")
def test_a_quick_run_measures_every_case_and_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    results = benchmark.main(
        ["--device=cpu", "--quick", "--rounds=1", "--threads=1", f"--results={tmp_path}"]
    )
    assert json.loads((tmp_path / "step-cpu.json").read_text()) == results
    assert [each["workload"] for each in results["workloads"]] == [each.name for each in QUICK]
    for workload in results["workloads"]:
        assert [row["case"] for row in workload["rows"]] == [*NAMED]
        for row in workload["rows"]:
            assert row["ms"] > 0
            moved = row["bytes_per_parameter"] * workload["parameters"]
            assert row["GB_per_s"] == pytest.approx(moved / row["ms"] / 1e6)
            assert row["ns_per_parameter"] == pytest.approx(
                1e6 * row["ms"] / workload["parameters"]
            )
    assert results["environment"]["threads"] == 1
    assert results["environment"]["packages"]["deepspeed"] is None
    printed = capsys.readouterr().out
    for workload in results["workloads"]:
        assert step_report.table(workload) in printed
    assert step_report.notes(results) in printed
    assert "Not run: DeepSpeed CPUAdam: deepspeed is not installed\n" in printed
    assert "Not run: bitsandbytes AdamW, 32 bit: bitsandbytes is not installed\n" in printed
    assert "No chart: matplotlib is not installed" in printed


@pytest.mark.usefixtures("no_packages")
def test_a_run_on_a_gpu_adds_the_host_and_a_profile(tmp_path, capsys):
    """On the stub, which shares all but events, graphs and the profiler's CUDA events."""
    arguments = ["--quick", "--rounds=1", "--cases", "ours fp16", "AdamW, fused"]
    results = benchmark.main(["--device=stub", *arguments, f"--results={tmp_path}"])
    assert json.loads((tmp_path / "step-stub.json").read_text()) == results
    printed = capsys.readouterr().out
    for workload in results["workloads"]:
        assert (workload["reference"], workload["rounds"]) == ("copied", 1)
        assert [row["case"] for row in workload["rows"]] == [
            "ours fp16", "ours fp16, clip", "torch AdamW, fused", "torch AdamW, fused, replayed",
            "ours fp16, replayed",
        ]  # fmt: skip
        for row in workload["rows"]:
            assert 0 < row["host_ms"] <= row["ms"]
            assert row["ms_again"] is None
            assert ("profile" in row) != ("replayed" in row["case"])
            profile = row.get("profile", {"launches": 1, "kernels_ms": 1.0})
            assert profile["launches"] > 0
            assert profile["kernels_ms"] > 0
        assert step_report.table(workload) in printed
        assert "| of copy | times ours | host, ms |" in step_report.table(workload)
        assert step_report.profile_table(workload) in printed


@pytest.mark.usefixtures("no_packages")
def test_the_json_is_written_after_each_case_and_each_round(tmp_path, monkeypatch):
    seen = []
    write = benchmark.write

    def spy(results, path):
        write(results, path)
        seen.append(json.loads(path.read_text()))

    monkeypatch.setattr(benchmark, "write", spy)
    arguments = ["--device=stub", "--quick", "--rounds=2", "--cases", "ours fp16"]
    benchmark.main([*arguments, f"--results={tmp_path}"])
    first = [each["workloads"][0] for each in seen if len(each["workloads"]) == 1]
    # Three cases are looked at one by one, then two rounds.
    assert [(len(each["rows"]), each["rounds"]) for each in first] == [
        (1, 0), (2, 0), (3, 0), (3, 1), (3, 2),
    ]  # fmt: skip
    assert [len(each["workloads"]) for each in seen[5:]] == [2] * (len(seen) - 5)


def test_what_time_is_not_left_for_is_named(tmp_path, capsys):
    arguments = ["--device=stub", "--quick", "--cases", "ours fp16", "--seconds=0"]
    results = benchmark.main([*arguments, f"--results={tmp_path}"])
    for workload in results["workloads"]:
        assert workload["rows"] == []
        assert workload["not_run"] == dict.fromkeys(
            ["ours fp16", "ours fp16, clip", "ours fp16, replayed"], "no time was left"
        )
    printed = capsys.readouterr().out
    assert "Not run: ours fp16: no time was left\n" in printed
    assert "No chart: nothing was measured" in printed


def fail(arena: Arena) -> Running:
    raise OSError("no compiler\nand more")


def test_a_failure_of_ours_is_told_and_the_other_cases_go_on(tmp_path, capsys, monkeypatch):
    cases = (Case("ours", "ours", (), fail), ON_GPUS["ours bf16"])
    monkeypatch.setattr(benchmark, "CASES", cases)
    results = benchmark.main(["--device=stub", "--quick", f"--results={tmp_path}"])
    for workload in results["workloads"]:
        assert workload["failed"] == {"ours": "OSError: no compiler"}
        assert [row["case"] for row in workload["rows"]] == ["ours bf16"]
    assert step_report.failures(results)[0] == "FAILED: ours, 30 x 1000: OSError: no compiler"
    assert step_report.failures(results)[0] in capsys.readouterr().out


def test_a_device_that_is_not_usable_any_more_ends_the_run(tmp_path, monkeypatch):
    class Dead(Stub):
        def wait(self) -> None:
            if dead:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    dead = []

    def kill(arena: Arena) -> Running:
        dead.append(True)
        raise RuntimeError("it did")

    monkeypatch.setitem(step_device.DEVICES, "stub", Dead)
    cases = (ON_GPUS["ours bf16"], Case("ours", "ours", (), kill), ON_GPUS["ours fp32"])
    monkeypatch.setattr(benchmark, "CASES", cases)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        benchmark.main(["--device=stub", "--quick", f"--results={tmp_path}"])
    left = json.loads((tmp_path / "step-stub.json").read_text())
    assert left["ended_by"].startswith("RuntimeError: CUDA error: an illegal memory access")
    (workload,) = left["workloads"]
    assert [row["case"] for row in workload["rows"]] == ["ours bf16"]
    assert workload["failed"] == {"ours": "RuntimeError: it did"}


@pytest.mark.usefixtures("no_packages")
def test_host_time_is_given_for_each_tensor(tmp_path, capsys):
    results = benchmark.main(
        ["--device=cpu", "--quick", "--host", "--rounds=1", f"--results={tmp_path}"]
    )
    assert json.loads((tmp_path / "step-host-cpu.json").read_text()) == results
    (host,) = results["host"]
    assert [row["case"] for row in host["rows"]] == [*NAMED]
    assert all(row["ns_per_tensor"] > 0 for row in host["rows"])
    assert "| host, ns a tensor" in capsys.readouterr().out


def test_what_cannot_run_is_named_but_a_failure_of_ours_raises():
    arena = Arena(SHAPES, "cpu")
    other = Case("theirs", "ours fp32", (), fail, package="torch")
    assert step_timing.start(other, arena, Cpu()) == "OSError: no compiler"

    def fill(arena: Arena) -> Running:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    large = Case("ours", "ours", (), fill)
    assert step_timing.start(large, arena, Cpu()) == "the device has too little memory"
    with pytest.raises(OSError, match="no compiler"):
        step_timing.start(Case("ours", "ours", (), fail), arena, Cpu())


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "benchmarks/results"),
        (["--host"], "benchmarks/results"),
        (["--quick"], "build/bench"),
        (["--cases", "ours"], "build/bench"),
        (["--workloads", "BERT-base"], "build/bench"),
        (["--seconds", "60"], "build/bench"),
        (["--device", "stub"], "build/bench"),
        (["--quick", "--results", "here"], "here"),
    ],
)
def test_only_a_whole_run_goes_beside_the_published_results(arguments, folder):
    args = benchmark.parse_args(["--device=cpu", *arguments])
    name = "step-host-nvidia-h200.json" if "--host" in arguments else "step-nvidia-h200.json"
    path = benchmark.place_of(args, {"device": "NVIDIA H200"})
    assert path.as_posix().endswith(f"{folder}/{name}")


# --- What is said


def row(case: str, ours: str, ms: float, ratio: float | None, part: float = 0.5) -> dict:
    return {
        "case": case, "compared_with": ours, "times_ours": ratio, "of_reference": part,
        "bytes_per_parameter": 30, "passes": ["a R1"], "ms": ms, "ns_per_parameter": ms / 2,
        "GB_per_s": 60.0 / ms, "ms_again": None,
    }  # fmt: skip


FIXED = {
    "environment": {
        "device": "cpu", "processor": "A processor", "threads": 2, "cores": 4, "rounds": 5,
        "cpu_level": "avx2", "torch": "2.13.0", "apex_mp": "0.1.0",
        "taken_by_others": {"programs": 0.25, "machines": 0.0},
    },
    "workloads": [
        {
            "workload": "BERT-base", "tensors": 2, "parameters": 2_000_000,
            "reference_GB_per_s": {"median": 50.0, "lowest": 40.0, "highest": 61.25},
            "rows": [
                row("ours fp16", "ours fp16", 1.0, 1.0, 0.97),
                row("plain torch fp16, foreach", "ours fp16", 1.75, 1.76),
                row("ours fp16, clip", "ours fp16, clip", 1.0, 1.0),
                row("plain torch fp16, foreach, clip", "ours fp16, clip", 122.2, 122.15),
                row("theirs", "ours fp32", 12.0, None),
            ],
            "not_run": {"apex FusedAdam": "apex is not installed"},
        }
    ],
    "host": [],
}  # fmt: skip

TABLE = """\
BERT-base: 2.00 M parameters in 2 tensors; memory, in place, 50.0 GB/s (40.0 to 61.2)

| case                            | bytes |   ms | ns/param | GB/s | of memory | times ours |
| ------------------------------- | ----: | ---: | -------: | ---: | --------: | ---------: |
| ours fp16                       |    30 | 1.00 |     0.50 | 60.0 |      0.97 |            |
| plain torch fp16, foreach       |    30 | 1.75 |     0.88 | 34.3 |      0.50 |       1.76 |
| ours fp16, clip                 |    30 | 1.00 |     0.50 | 60.0 |      0.50 |            |
| plain torch fp16, foreach, clip |    30 |  122 |     61.1 | 0.49 |      0.50 |     122.15 |
| theirs                          |    30 | 12.0 |     6.00 | 5.00 |      0.50 |          - |"""


def test_the_table_says_what_was_measured():
    assert step_report.table(FIXED["workloads"][0]) == TABLE
    where = step_report.surroundings(FIXED["environment"])
    assert where.startswith("A processor, 2 of 4 cores, avx2, torch 2.13.0, apex_mp 0.1.0;")
    text = step_report.notes(FIXED)
    assert text.startswith(
        "Meanwhile other programs took 25 % of the processors, other machines 0 %.\n"
    )
    assert "Not run: apex FusedAdam: apex is not installed" in text
    assert "  theirs: a R1 = 30" in text


def test_the_table_of_a_small_model_says_what_a_step_takes_with_warm_caches():
    rows = [{**each, "ms_again": 0.25} for each in FIXED["workloads"][0]["rows"]]
    first, _, line, *_ = step_report.table({**FIXED["workloads"][0], "rows": rows}).split("\n")[2:]
    assert first.endswith("| times ours | again, ms |")
    assert line.endswith("|            |      0.25 |")


def test_what_ran_on_some_workloads_only_is_named_with_the_others():
    (one,) = FIXED["workloads"]
    late = {**one, "workload": "Late", "not_run": one["not_run"] | {"a": "no time was left"}}
    assert step_report.not_run({**FIXED, "workloads": [one, late]}) == [
        "Not run: apex FusedAdam: apex is not installed",
        "Not run: a, Late: no time was left",
    ]


def test_a_page_of_a_gpu_has_no_aims_of_a_cpu():
    assert len(step_report.aims(FIXED)) == 1
    on_gpu = {**FIXED, "environment": {**FIXED["environment"], "device": "NVIDIA H100"}}
    assert step_report.aims(on_gpu) == []


def test_what_others_took_is_what_the_machine_was_busy_with_besides(monkeypatch):
    monkeypatch.setattr(step_machine.os, "cpu_count", lambda: 2)
    begin = step_machine.clock("cpu  100 0 100 900 0 0 0 50 7 7", own=1.0, wall=10.0, ticks=100)
    assert begin == (10.0, 2.0, 0.5, 1.0)
    end = step_machine.Clock(wall=20.0, busy=14.0, stolen=1.5, own=8.0)
    assert step_machine.taken_by_others(begin, end) == {"programs": 0.25, "machines": 0.05}
    assert step_machine.taken_by_others(None, None) is None


def test_the_finding_is_the_best_of_the_others():
    assert step_report.finding(FIXED) == (
        "BERT-base in fp16: a step in plain torch takes 1.8 times as long, "
        "with clipping 122.2 times"
    )


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the chart needs matplotlib"
)
def test_the_chart_is_a_png_beside_the_json(tmp_path):
    said = benchmark.write_chart(FIXED, tmp_path / "step-cpu.png")
    picture = (tmp_path / "step-cpu.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 10_000
    assert said == f"Written: {tmp_path / 'step-cpu.png'}"


RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["step-cpu.json", "step-host-cpu.json"])
def test_the_page_shows_the_published_figures(name):
    said = step_report.page(json.loads((RESULTS / name).read_text()))
    page = (ROOT / "docs" / "speed.md").read_text()
    assert said in page, f"docs/speed.md must hold what {name} says:\n{said}"
