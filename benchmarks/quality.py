"""How well a model trains by the way in which FusedAdam keeps masters and moments.

    python -m benchmarks.quality                print the table; write JSON and a picture
    python -m benchmarks.quality --quick        seconds, to see that it works

Weights and gradients are of 16 bits; forward and backward compute in float32 with the weights as
they are, because torch's float16 layers are many times slower on a CPU: so what differs between
ways is the optimizer alone. Each run begins with the same weights and takes the same batches as the
others of its seed. BERT needs transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam
from benchmarks import quality_chart, quality_report
from benchmarks.quality_tasks import TASKS, Task
from benchmarks.saved import measure_and_save

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NARROW = {"master_weights": "split", "moment_dtype": torch.bfloat16}
# The first is the one that others are compared with.
WAYS: dict[str, dict[str, Any]] = {
    "float32 masters": {"master_weights": "float32"},
    "split masters": {"master_weights": "split"},
    "split, bfloat16 moments": NARROW,
    "split, bfloat16 moments, stochastic": {**NARROW, "stochastic_rounding": True},
    "no masters": {},
}
POINTS = 200  # of a curve
LONG = 10_000  # steps


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run leaves: mean losses of equal parts of it, and the loss on unseen data."""

    curve: list[float]
    score: float


def train(
    task: Task,
    dtype: torch.dtype,
    way: dict[str, Any],
    seed: int,
    kind: Callable[..., torch.optim.Optimizer] = FusedAdam,
) -> Run:
    """Train a model of a task from a seed."""
    torch.manual_seed(seed)
    model = task.build().to(dtype)
    optimizer = kind(model.parameters(), lr=task.lr, **way)
    scaler = GradScaler("cpu", init_scale=2.0**12, enabled=dtype == torch.float16)
    losses = []
    for step in range(task.steps):
        cosine = (1 + math.cos(math.pi * step / task.steps)) / 2
        set_lr(optimizer, task.lr * (0.1 + 0.9 * cosine))
        arguments, loss_of = task.batch(seed, step)
        loss = loss_of(functional_call(model, dict(in_float32(model)), arguments))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    part = max(task.steps // POINTS, 1)
    curve = [statistics.fmean(losses[i : i + part]) for i in range(0, task.steps, part)]
    return Run([round(loss, 5) for loss in curve], round(score(task, model), 5))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate, in place if the optimizer (torchao's) keeps it in a tensor."""
    (group,) = optimizer.param_groups
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def in_float32(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in model.named_parameters():
        yield name, param.float()


@torch.no_grad()
def score(task: Task, model: nn.Module) -> float:
    """Return the mean loss on what was not trained on."""
    losses = []
    for arguments, loss_of in task.test():
        output = functional_call(model, dict(in_float32(model)), arguments)
        losses.append(loss_of(output).item())
    return statistics.fmean(losses)


@functools.cache
def _task(name: str, steps: int | None) -> Task:
    task = TASKS[name]()
    return task if steps is None else dataclasses.replace(task, steps=steps)


def _run(name: str, steps: int | None, dtype: str, way: str, seed: int) -> dict[str, Any]:
    run = train(_task(name, steps), DTYPES[dtype], WAYS[way], seed)
    print(f"{name}, {dtype}, {way}, seed {seed}: {run.score:.4f}", flush=True)
    return dataclasses.asdict(run)


def seeds_of(task: Task, way: str, seeds: int) -> int:
    """Return how many runs there are; of a long one those that show how far seeds are apart."""
    if task.steps < LONG:
        return seeds
    return 3 if way == next(iter(WAYS)) else 1


def measure(names: Sequence[str], steps: int | None, seeds: int) -> dict[str, Any]:
    """Return all runs, each by a process with one thread."""
    found: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        initializer=torch.set_num_threads, initargs=(1,), mp_context=spawn
    ) as pool:
        for name in names:
            task = _task(name, steps)
            for dtype in DTYPES:
                ways = {
                    way: [
                        pool.submit(_run, name, steps, dtype, way, seed)
                        for seed in range(seeds_of(task, way, seeds))
                    ]
                    for way in WAYS
                }
                found.append({"task": task.name, "steps": task.steps, "dtype": dtype, "ways": ways})
        for each in found:
            each["ways"] = {
                way: [run.result() for run in runs] for way, runs in each["ways"].items()
            }
    return {"runs": found}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind [5]")
    parser.add_argument("--steps", type=int, help="of each run, instead of the task's own")
    parser.add_argument("--quick", action="store_true", help="4 steps, 2 seeds, two tasks")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    if args.quick:
        args.tasks, args.seeds, args.steps = ["digits", "decoder"], 2, 4
    results = measure_and_save(
        str(args.results / "quality-{}.json"),
        "cpu",
        functools.partial(measure, args.tasks, args.steps, args.seeds),
        quality_report.page,
    )
    quality_chart.draw(results, args.results / "quality-cpu.png")
    return results


if __name__ == "__main__":
    main()
