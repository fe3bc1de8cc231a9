"""What apex_mp.monitor costs a step, with and without a sample of gradient exponents.

    python -m benchmarks.monitor                print the table, write it to benchmarks/results/

FP16_Optimizer steps the parameters of BERT-base in float16, with FusedAdam, clipping and gradients
of random numbers. Forward and backward, beside which a step is short, are not in it. The variants
take turns, round after round; the table gives medians.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam
from benchmarks import step_machine
from benchmarks.amp import environment
from benchmarks.step_device import seconds
from benchmarks.step_report import markdown
from benchmarks.step_shapes import bert_base

RESULTS = Path(__file__).resolve().parent / "results"
EVERY = 100
TIMED = ("no monitor", "monitor", "sampled step")


class Parameters(nn.Module):
    """The parameters of a model, without the model."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            values = torch.randn(shape, device=device).half()
            self.register_parameter(f"p{index}", nn.Parameter(values))


def measure(device: str, *, rounds: int, parameters: int | None = None) -> dict[str, Any]:
    """Return median milliseconds of a step, for each of TIMED.

    Args:
        device: Where.
        rounds: Of which medians are taken.
        parameters: How many of the tensors to take [all].
    """
    model = Parameters([*bert_base()][:parameters], device)
    inner = FusedAdam(model.parameters(), lr=1e-5, max_grad_norm=1.0)
    optimizer = FP16_Optimizer(inner, static_loss_scale=1024.0, verbose=False)
    assert optimizer.loss_scale == 1024.0  # What the gradients below are said to have.
    for param in model.parameters():
        # Over the range of float16, as gradients are.
        param.grad = (torch.randn_like(param) * torch.exp2(-16 * torch.rand_like(param))).half()
    grads = [param.grad for param in model.parameters()]
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    for round_number in range(rounds + 1):
        for name in TIMED:
            every = 1 if name == "sampled step" else None
            monitor = None if name == "no monitor" else Monitor(optimizer, model=model, every=every)
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad.clone()  # type: ignore[union-attr]
            took = seconds(optimizer.step, device)
            if monitor is not None:
                assert len(monitor.history.samples) == (every or 0)
                monitor.close()
            if round_number:  # The first warms up.
                times[name].append(1e3 * took)
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "every": EVERY,
        "ms": {name: statistics.median(each) for name, each in times.items()},
    }


def shares(run: dict[str, Any]) -> tuple[float, float]:
    """Return what a sample costs: part of the step in which it is taken, and of all steps."""
    ms = run["ms"]
    extra = (ms["sampled step"] - ms["no monitor"]) / ms["no monitor"]
    return extra, extra / run["every"]


def page(results: dict[str, Any]) -> str:
    """Return the table, as docs/monitor.md shows it."""
    facts, run = results["environment"], results["run"]
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    of_one, of_all = shares(run)
    rows = [
        [
            *(f"{run['ms'][name]:.1f}" for name in TIMED),
            f"{100 * of_one:.0f} %",
            f"{100 * of_all:.2f} %",
        ]
    ]
    head = [*(f"{name}, ms" for name in TIMED), "sample", f"one in {run['every']} steps"]
    said = (
        f"{where}, torch {facts['torch']}; optimizer steps of BERT-base in float16, "
        f"{run['parameters'] / 1e6:.0f} M parameters"
    )
    return "\n".join([said, "", *markdown(head, rows)])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parameters", type=int, help="take the first so many tensors only")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    begin = step_machine.now()
    results = {
        "environment": environment(args.device),
        "run": measure(args.device, rounds=args.rounds, parameters=args.parameters),
    }
    results["environment"]["taken_by_others"] = step_machine.taken_by_others(
        begin, step_machine.now()
    )
    slug = re.sub(r"[^a-z0-9]+", "-", results["environment"]["device"].lower()).strip("-")
    path = args.results / f"monitor-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(page(results), f"Written: {path}", sep="\n\n")
    return results


if __name__ == "__main__":
    main()
