"""benchmarks.step measures what it says, and its peers do the work that ours does."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import step as benchmark
from benchmarks import step_cases, step_machine, step_peers, step_report, step_timing
from benchmarks.step_arena import SCALE, Arena, Case
from benchmarks.step_shapes import QUICK, WORKLOADS

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

SHAPES = [(40, 30), (30,), (7, 3, 3)]
NAMED = {case.name: case for case in step_cases.CASES}


# --- What is stepped


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("ResNet-50", 161, 25_557_032),
        ("BERT-base", 199, 109_482_240),
        ("GPT-2-medium", 292, 354_823_168),
        ("1 x 100M", 1, 100_000_000),
        ("1000 x 1024", 1000, 1_024_000),
        ("2000 x 64", 2000, 128_000),
        ("10000 x 64", 10_000, 640_000),
        ("100 x 10M", 100, 1_000_000_000),
    ],
)
def test_each_workload_has_the_parameters_of_its_model(name, tensors, parameters):
    (workload,) = [each for each in WORKLOADS if each.name == name]
    assert (len(workload.shapes), workload.parameters) == (tensors, parameters)


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
    running, not_run = step_timing.build(step_cases.CASES, arena)
    assert not not_run
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


def test_the_reference_reads_and_writes_every_byte_that_it_claims():
    reference = step_timing.Reference("cpu", 1)
    assert reference.bytes == 2 * 2**20
    where = reference.tensor.data_ptr()
    reference.once(2.0)
    assert reference.tensor.data_ptr() == where
    assert (reference.tensor == 2.0).all()
    assert reference.tensor.nbytes == 2**20


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


@pytest.mark.parametrize(("is_small", "steps"), [(False, 1), (True, 4)])
def test_only_a_small_model_is_stepped_with_warm_caches(is_small, steps):
    calls = []
    case = step_timing.Running(lambda: calls.append("prepare"), lambda: calls.append("step"))
    reference = step_timing.Reference("cpu", 1)
    ((_, (time,)),) = step_timing.take_turns({"a": case}, 1, reference, is_small).items()
    assert calls == ["prepare", "step"] * steps * 2  # a round to warm up, and one that counts
    assert (time.again is not None) == is_small


# --- A run


@pytest.fixture
def no_packages(monkeypatch):
    """Hide the other packages, whatever is installed."""
    monkeypatch.setattr(step_peers, "version", lambda package: None)


@pytest.mark.usefixtures("no_packages")
def test_a_quick_run_measures_every_case_and_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "write", write_without_chart(benchmark.write, monkeypatch))
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


def write_without_chart(write, monkeypatch):
    def wrapped(results, path):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name: None)
            return write(results, path)

    return wrapped


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
    def fail(arena: Arena) -> step_timing.Running:
        raise OSError("no compiler\nand more")

    other = Case("theirs", "ours fp32", (), fail, package="torch")
    running, not_run = step_timing.build([other], Arena(SHAPES, "cpu"))
    assert (running, not_run) == ({}, {"theirs": "OSError: no compiler"})

    def fill(arena: Arena) -> step_timing.Running:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    running, not_run = step_timing.build([Case("ours", "ours", (), fill)], Arena(SHAPES, "cpu"))
    assert (running, not_run) == ({}, {"ours": "the device has too little memory"})
    with pytest.raises(OSError, match="no compiler"):
        step_timing.build([Case("ours", "ours", (), fail)], Arena(SHAPES, "cpu"))


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "benchmarks/results"),
        (["--host"], "benchmarks/results"),
        (["--quick"], "build/bench"),
        (["--cases", "ours"], "build/bench"),
        (["--workloads", "BERT-base"], "build/bench"),
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
    said = benchmark.write(FIXED, tmp_path / "step-cpu.json")
    assert json.loads((tmp_path / "step-cpu.json").read_text()) == FIXED
    picture = (tmp_path / "step-cpu.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 10_000
    assert said == [
        f"Written: {tmp_path / 'step-cpu.json'}",
        f"Written: {tmp_path / 'step-cpu.png'}",
    ]


RESULTS = Path(benchmark.__file__).resolve().parent / "results"


@pytest.mark.parametrize("name", ["step-cpu.json", "step-host-cpu.json"])
def test_the_page_shows_the_published_figures(name):
    said = step_report.page(json.loads((RESULTS / name).read_text()))
    page = (RESULTS.parents[1] / "docs" / "speed.md").read_text()
    assert said in page, f"docs/speed.md must hold what {name} says:\n{said}"
