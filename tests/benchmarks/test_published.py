"""docs/data.md shows all results, made anew for the site; what other pages quote is in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import activation_report, monitor, published

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

DOCS = Path(__file__).resolve().parents[2] / "docs"
# CI reads the first; pages of recipes show the others.
H100 = "nvidia-h100-80gb-hbm3.json"
SHOWN_ELSEWHERE = {"nightly.json", "digits-cpu.json", "rl-fp16-cpu.json"}


def test_every_file_of_results_has_its_place_on_the_page() -> None:
    page = (DOCS / "data.md").read_text()
    named = re.findall(r"^(?:Table .*`|<!-- )python -m benchmarks.published (\S+json)", page, re.M)
    files = {path.name for path in published.RESULTS.glob("*.json")} - SHOWN_ELSEWHERE
    assert {*named} == files == {*published.PAGES}


def test_the_table_that_readme_links_to_stands_on_the_page_itself() -> None:
    table = published.text(f"training-{H100}")
    assert f"training-{H100} -->\n{table}\n" in (DOCS / "data.md").read_text()
    assert "[all ways](docs/data.md#training)" in page("../README.md")


@pytest.mark.parametrize("name", published.PAGES)
def test_what_is_shown_is_a_table(name: str) -> None:
    assert re.search(r"^\|.*\|\n\|[ :|-]+\|\n\|.*\d.*\|$", published.text(name), re.M)


def results(name: str) -> Any:
    return json.loads((published.RESULTS / name).read_text())


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def test_the_page_of_speed_quotes_the_many_small_tensors() -> None:
    (small,) = [w for w in results("step-cpu.json")["workloads"] if w["workload"] == "2000 x 64"]
    ms = {row["case"]: row["ms"] for row in small["rows"]}
    said = (
        f"A float32 step of ours takes {ms['ours fp32']:.1f} ms there with cold caches, the "
        f"fastest other {ms['DeepSpeed CPUAdam']:.1f} ms; float16 {ms['ours fp16']:.1f} and "
        f"{ms['plain torch fp16, foreach']:.1f} ms"
    )
    assert said in page("speed.md")


def test_readme_and_pages_quote_the_h100() -> None:
    ways = {row["case"]: row for row in results(f"training-{H100}")["rows"]}

    def said(way: str) -> str:
        return f"{ways[way]['step_ms']:.1f} ms and {ways[way]['peak_GiB']:.1f} GiB"

    readme = page("../README.md")
    split = said("ours fp16 weights, GradScaler, split masters")
    assert f"takes {split} with float16 weights and split masters" in readme
    narrow = said("ours bf16 weights, split, bf16 moments, stochastic")
    assert f"{narrow} with bfloat16 weights and moments" in readme
    lossy = said("torch bf16 weights + AdamW(fused), no masters")
    assert f"without masters take {lossy}, and lose small updates" in readme
    torchs = "torch autocast fp16 + GradScaler + AdamW(fused), fp32 weights"
    assert f"AdamW(fused) takes {said(torchs)} (" in readme
    workloads = {each["workload"]: each for each in results(f"step-{H100}")["workloads"]}
    rows = {
        (workload, row["case"]): row for workload, each in workloads.items() for row in each["rows"]
    }
    clipped = rows["BERT-large", "ours fp16, clip"]
    plain = rows["BERT-large", "plain torch fp16, foreach, clip"]
    assert f"take {clipped['ms']:.2f} ms there; in plain torch {plain['ms']:.2f} ms" in readme
    assert f"takes {clipped['ms']:.2f} ms, 1e9 parameters" in page("speed.md")
    assert f"1e9 parameters {rows['1 x 1000M', 'ours fp16, clip']['ms']:.1f} ms" in page("speed.md")
    assert f"clip {clipped['ms']:.2f} ms, {clipped['of_reference']:.2f} of" in page("gpu.md")
    resnet = {case: f"{row['ms']:.2f}" for (name, case), row in rows.items() if name == "ResNet-50"}
    assert f"took {resnet['ours fp32, our GradScaler, clip']} ms in GradScaler with a clip" in page(
        "speed.md"
    )
    assert f"{resnet['ours fp32']} in FusedAdam alone, {resnet['ours fp32, replayed']} re" in page(
        "speed.md"
    )
    assert f"{resnet['ours fp16, clip']} in FP16_Optimizer" in page("speed.md")
    assert (
        f"takes {resnet['ours fp16, replayed']} ms, launched from the host {resnet['ours fp16']} |"
        in page("gpu.md")
    )
    split, narrow = (
        rows["BERT-large", f"ours bf16, split{kind}"] for kind in ("", ", bf16 moments")
    )
    assert f"takes {split['times_ours']:.2f} of the time" in page("memory.md")
    assert f"too {narrow['times_ours']:.2f} ({narrow['ms']:.2f} ms)" in page("memory.md")


def test_the_page_of_memory_quotes_the_times_of_split_masters() -> None:
    rows = [row for w in results("step-modes-cpu.json")["workloads"] for row in w["rows"]]

    def times(*kinds: str, stochastic: bool) -> str:
        found = [
            row["times_ours"]
            for row in rows
            if row["case"].startswith(kinds) and ("stochastic" in row["case"]) == stochastic
        ]
        return f"{min(found):.2f} to {max(found):.2f}"

    bf16, fp16 = "ours bf16, split", "ours fp16, split"
    said = (
        f"a bfloat16 step with split masters takes {times(bf16, stochastic=False)} of the time "
        f"with float32 masters, a float16 step {times(fp16, stochastic=False)}, with stochastic "
        f"rounding {times(bf16, fp16, stochastic=True)} ("
    )
    assert said in page("memory.md")


def test_the_page_of_memory_quotes_master_weights_beside_fused_adam() -> None:
    workloads = results("step-masters-cpu.json")["workloads"]
    held = results("memory-cpu.json")["workloads"][0]["rows"]

    def said(case: str) -> str:
        rows = [{row["case"]: row for row in workload["rows"]} for workload in workloads]
        # Medians of each round's ratio, where the report has them.
        times = [
            row[case]["times_ours"] or row[case]["ms"] / row["ours bf16"]["ms"] for row in rows
        ]
        (memory,) = [row for row in held if row["case"] == case]
        bytes_held = f"{sum(memory['held'].values()):.0f}; {memory['step']:.0f}"
        return f" | {min(times):.2f} to {max(times):.2f} | {bytes_held} |"

    text = page("memory.md")
    around = "MasterWeights(AdamW, "
    assert f"`MasterWeights(params, AdamW, fused=True)`{said(around + 'fused)')}" in text
    assert f"`keep_grads=True`{said(around + 'fused), keep_grads')}" in text
    assert f'with `master_weights="split"`{said(around + "fused), split")}' in text
    assert f"AdamW, foreach=True)`{said(around + 'foreach)')}" in text
    assert f"for comparison{said('torch AdamW, fused')}" in text


def test_the_page_of_memory_quotes_what_a_lack_of_masters_costs() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.quality_chart import beyond, finding

    (run,) = [
        each
        for each in results("quality-cpu.json")["runs"]
        if (each["task"], each["dtype"]) == ("decoder", "bfloat16")
    ]
    (bare,), (masters, *_) = (run["ways"][way] for way in ("no masters", "float32 masters"))
    said = (
        f"end with a training loss {beyond(run, 'no masters'):.2f} higher (chart), and lose "
        f"{bare['score'] - masters['score']:.2f} of {masters['score']:.2f} on unseen data"
    )
    assert said in page("memory.md")
    assert f"a training loss {beyond(run, 'no masters'):.2f} higher" in finding([run])


def test_the_page_of_memory_quotes_batches_and_shares() -> None:
    bert, resnet = (activations_of(model) for model in results("activations-cpu.json")["models"])
    text = page("memory.md")
    assert f"{bert['fp32']} in float32, {bert['fp16, FP16_Optimizer']} in float16, " in text
    assert f"{bert['amp.init']} under `amp.init`" in text
    fp16, autocast = bert["fp16, FP16_Optimizer"], bert["amp.init"]
    said = f"of {fp16} for BERT-base in float16, of {autocast} under autocast"
    assert said in page("../README.md")
    three = (resnet[mode] for mode in ("fp32", "fp16, FP16_Optimizer", "amp.init"))
    assert f"of ResNet-50 at 224 x 224: {', '.join(map(str, three))}" in text


def activations_of(model: dict[str, Any]) -> dict[str, int]:
    """The largest batch of each mode, from the lines that the page of figures shows."""
    said = activation_report.finding(model)
    found = {"fp32": int(re.search(r"a batch of (\d+) in fp32", said)[1])}  # type: ignore[index]
    return found | {mode: int(n) for n, mode in re.findall(r"(\d+) \(([^)]*)\)", said)}


def test_the_pages_of_casts_and_monitor_quote_their_ratios() -> None:
    ratios = [row["ratio"]["amp.init / torch.autocast"] for row in results("amp-cpu.json")["rows"]]
    assert round(100 * max(ratio - 1 for ratio in ratios if ratio)) == 8
    assert "within 8 %" in page("casts.md")
    of_step, of_training, _ = monitor.shares(results("monitor-cpu.json")["run"])
    said = (
        f"took {100 * of_step:.0f} % longer than another, which is {100 * of_training:.1f} % of a"
    )
    assert said in page("monitor.md")


def test_the_recipe_of_reinforcement_learning_shows_what_it_is_for() -> None:
    rows = {row["run"]: row for row in results("rl-fp16-cpu.json")["rows"]}
    assert len(rows["fp16"]["seeds"]) == 3
    pairs = zip(rows["fp16"]["mismatch"], rows["bf16"]["mismatch"], strict=True)
    assert all(half <= brain / 5 for half, brain in pairs)
    assert rows["fp16"]["outside"] == [0.0] * 3
    assert min(rows["bf16"]["outside"]) > 0.1
    rewards = {name: row["reward"] for name, row in rows.items()}
    assert sum(rewards["fp16"]) / 3 >= min(rewards["fp32"])
    assert max(rewards["bf16, no masters"]) < min(rewards["fp32"])
    assert min(rows["bf16, no masters"]["lost"]) > 0.85
