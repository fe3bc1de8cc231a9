"""What benchmarks.step prints of its results."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import step as benchmark
from benchmarks import step_machine, step_report

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


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
    where = step_report.surroundings(FIXED)
    assert where.startswith("A processor, 2 of 4 cores, avx2, torch 2.13.0, apex_mp 0.1.0;")
    text = step_report.notes(FIXED)
    assert text.startswith(
        "Medians of 5 rounds.\n"
        "Meanwhile other programs took 25 % of the processors, other machines 0 %.\n"
    )
    assert "Not run: apex FusedAdam: apex is not installed" in text
    assert "  theirs: a R1 = 30" in text


def test_the_rounds_told_are_those_that_were_run():
    (one,) = FIXED["workloads"]
    runs = [{**one, "rounds": rounds} for rounds in (3, 2, 3)]
    cut = {**FIXED, "workloads": runs}
    assert step_report.surroundings(cut).endswith("0.1.0; medians of 2 to 3 rounds")
    assert step_report.notes(cut).startswith("Medians of 2 to 3 rounds.\n")
    compared = {**FIXED, "workloads": [], "builds": runs[:1]}
    assert step_report.surroundings(compared).endswith("0.1.0; medians of 3 rounds")
    assert step_report.surroundings(FIXED).endswith("0.1.0; medians of 5 rounds")  # all of them


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


def test_the_summary_sets_ours_beside_the_fastest_other():
    assert step_report.summary(FIXED).splitlines()[2:] == [
        "| step                  |     model | ours, ms | fastest other, ms | times ours "
        "|                       the other |",
        "| --------------------- | --------: | -------: | ----------------: | ---------: "
        "| ------------------------------: |",
        "| float16 weights, clip | BERT-base |     1.00 |               122 |     122.15 "
        "| plain torch fp16, foreach, clip |",
    ]


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
