"""What apex_mp.monitor costs a step, with and without a sample of gradient exponents.

    python -m benchmarks.monitor                print the table, write it to benchmarks/results/

FP16_Optimizer steps BERT-base in float16, with FusedAdam, clipping and gradients of random numbers.
The variants take turns, round after round; the table gives medians. Forward and backward are timed
apart, of one sentence of 128 tokens: the least that a training step does beside the optimizer's.
They run in float32 on the CPU, where torch's float16 layers are many times slower.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam
from benchmarks.activation_models import QUICK, TASKS, Task
from benchmarks.saved import measure_and_save
from benchmarks.step_device import seconds
from benchmarks.step_report import markdown

RESULTS = Path(__file__).resolve().parent / "results"
EVERY = 100
PASSES = "forward, backward"
TIMED = ("no monitor", "monitor", "sampled step")


def measure(task: Task, device: str, *, rounds: int) -> dict[str, Any]:
    """Return median milliseconds of forward and backward, and of a step for each of TIMED.

    Args:
        task: The model.
        device: Where.
        rounds: Of which medians are taken.
    """
    with torch.device(device):
        model = task.build()
    times: dict[str, list[float]] = {name: [] for name in (PASSES, *TIMED)}
    model.to(torch.float16 if device == "cuda" else torch.float32)
    inputs = task.inputs(1).to(device)
    for _ in range(rounds + 1):
        model.zero_grad()
        times[PASSES].append(seconds(lambda: model(inputs).float().sum().backward(), device))
    optimizer, grads = prepare(model.half())
    for _ in range(rounds + 1):
        for name in TIMED:
            every = 1 if name == "sampled step" else None
            monitor = None if name == "no monitor" else Monitor(optimizer, model=model, every=every)
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad.clone()
            times[name].append(seconds(optimizer.step, device))
            if monitor is not None:
                assert len(monitor.history.samples) == (every or 0)
                monitor.close()
    return {
        "model": task.name,
        "parameters": sum(param.numel() for param in model.parameters()),
        "every": EVERY,
        # The first of each warms up.
        "ms": {name: 1e3 * statistics.median(each[1:]) for name, each in times.items()},
    }


def prepare(model: nn.Module) -> tuple[FP16_Optimizer, list[Tensor]]:
    """Return an optimizer of a model, and gradients over the range of float16."""
    inner = FusedAdam(model.parameters(), lr=1e-5, max_grad_norm=1.0)
    optimizer = FP16_Optimizer(inner, static_loss_scale=1024.0, verbose=False)
    assert optimizer.loss_scale == 1024.0  # What the gradients are said to have.
    grads = [
        (torch.randn_like(param) * torch.exp2(-16 * torch.rand_like(param))).half()
        for param in model.parameters()
    ]
    return optimizer, grads


def shares(run: dict[str, Any]) -> tuple[float, float, float]:
    """Return what a sample costs: part of the optimizer's step, of a training step, of all."""
    ms = run["ms"]
    extra = ms["sampled step"] - ms["no monitor"]
    of_training = extra / (ms[PASSES] + ms["no monitor"])
    return extra / ms["no monitor"], of_training, of_training / run["every"]


def page(results: dict[str, Any]) -> str:
    """Return the table, as docs/data.md shows it."""
    facts, run = results["environment"], results["run"]
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    ms = [f"{run['ms'][name]:.1f}" for name in (PASSES, *TIMED)]
    percent = [f"{100 * share:.2g} %" for share in shares(run)]
    head = [
        *(f"{name}, ms" for name in (PASSES, *TIMED)),
        "of the step",
        "of training",
        f"one in {run['every']} steps",
    ]
    millions = f"{run['parameters'] / 1e6:.0f} M parameters"
    said = f"{where}, torch {facts['torch']}; {run['model']}, {millions}"
    return "\n".join([said, "", *markdown(head, [[*ms, *percent]])])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small model, to try the program")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    task = (QUICK if args.quick else TASKS)[0]

    def measured() -> dict[str, Any]:
        return {"run": measure(task, args.device, rounds=args.rounds)}

    path = str(args.results / "monitor-{}.json")
    return measure_and_save(path, args.device, measured, page)


if __name__ == "__main__":
    main()
