"""Optimizers of other libraries for 16-bit weights, beside apex_mp's: bytes, losses, abilities.

    python -m benchmarks.rivals           what is installed; writes JSON
    python -m benchmarks.rivals --quick   to see that it works

Libraries: torchao, bitsandbytes, flashoptim, torch-optimi. One that is missing, or refuses the CPU,
is listed with its words. All take bfloat16 weights, the same Adam and the way of
benchmarks.quality: forward and backward in float32, so what differs is the optimizer alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import train
from benchmarks.quality_tasks import TASKS
from benchmarks.rivals_ways import BASE, WAYS, facts
from benchmarks.saved import measure_and_save
from benchmarks.step_report import markdown

RESULTS = Path(__file__).resolve().parent / "results"
STEPS = {"char_lstm": 500, "decoder": 2000}
PACKAGES = ("torch", "torchao", "bitsandbytes", "flashoptim", "torch-optimi")


def _loss(name: str, steps: int, way: str, seed: int) -> float:
    task = dataclasses.replace(_task(name), steps=steps)
    score: float = train(task, WAYS[way].dtype, {}, seed, WAYS[way]).score
    print(f"{name}, {way}, seed {seed}: {score}", flush=True)
    return score


@functools.cache
def _task(name: str) -> Any:
    return TASKS[name]()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(steps: dict[str, int], seeds: int, width: int) -> dict[str, Any]:
    """Return what each way holds and can, and its losses by task, a process for each core."""
    rows: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, way in WAYS.items():
        try:
            rows[name] = facts(way, width)
        except (ImportError, NotImplementedError, AssertionError) as error:
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        initializer=torch.set_num_threads, initargs=(1,), mp_context=spawn
    ) as pool:
        runs = {
            (name, task): [pool.submit(_loss, task, steps[task], name, s) for s in range(seeds)]
            for task in steps
            for name in rows
        }
        for (name, task), losses in runs.items():
            rows[name].setdefault("losses", {})[task] = [run.result() for run in losses]
    versions = {package: version(package) for package in PACKAGES}
    return {"versions": versions, "steps": steps, "rows": rows, "left_out": left_out}


def beyond(row: dict[str, Any], base: dict[str, Any], task: str) -> tuple[float, float]:
    """Return by how much the losses are above those in float32, same seeds: mean, deviation."""
    pairs = zip(row["losses"][task], base["losses"][task], strict=True)
    apart = [loss - other for loss, other in pairs]
    return statistics.fmean(apart), statistics.stdev(apart)


def total(row: dict[str, Any]) -> float:
    return sum(float(row["bytes"][name]) for name in ("weights", "gradients", "state"))


def page(results: dict[str, Any]) -> str:
    """Return the table: bytes a parameter, losses beyond float32, and abilities."""
    head = ["way", "bytes", *results["steps"], "torch's scaler", "ours", "from torch", "into torch"]
    asked = ("torch_GradScaler", "apex_mp_GradScaler", "from_torch", "into_torch")
    rows = []
    for name, row in results["rows"].items():
        apart = [beyond(row, results["rows"][BASE], task) for task in results["steps"]]
        losses = [f"{mean:+.4f} ± {deviation:.4f}" for mean, deviation in apart]
        answers = ["yes" if row[each] == "yes" else "no" for each in asked]
        rows.append([name, f"{total(row):.2f}", *losses, *answers])
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    said = (
        f"{results['environment']['processor']}; {versions}. bfloat16 weights but in the first "
        f"row; bytes a parameter of {row['bytes']['params']:,}; losses on unseen data beyond those "
        "in float32, mean and deviation over seeds; float16 gradients unscaled, clipped and "
        "stepped by which GradScaler; whose state_dict the next step goes on from."
    )
    left_out = [f"Left out: {name}. {why}" for name, why in results["left_out"].items()]
    return "\n\n".join([said, "\n".join(markdown(head, rows)), *left_out])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="4 steps, 2 seeds, a small model")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    steps, seeds, width = STEPS, args.seeds, 1024
    if args.quick:
        steps, seeds, width = dict.fromkeys(STEPS, 4), 2, 64
    found = functools.partial(measure, steps, seeds, width)
    return measure_and_save(str(args.results / "rivals-{}.json"), "cpu", found, page)


if __name__ == "__main__":
    main()
