"""What mixed precision saves in training: bytes of state, and of what is held for backward.

    python -m benchmarks.activations                    print the tables; write JSON and a picture
    python -m benchmarks.activations --budget "24 GiB"  the largest batch in as much memory
    python -m benchmarks.activations --quick            seconds, to see that it works

BERT-base at 128 tokens and ResNet-50 at 224 x 224, each in float32, in float16 and bfloat16 with
FP16_Optimizer, under amp.init, and with amp.initialize O1 and O2. docs/memory.md says how each
figure is come by.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp.casts import current as _current
from apex_mp.masters.masters import stored_grad
from apex_mp.optimizers import FP16_Optimizer, FusedAdam
from benchmarks import activation_report, memory_probe, step_machine
from benchmarks.activation_models import QUICK, TASKS, Task
from benchmarks.amp import environment

RESULTS = Path(__file__).resolve().parent / "results"
# Two batches give the line, and the third must lie on it. Not 1: a batch of one needs fewer copies.
BATCHES = (2, 3, 4)
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


class Training(NamedTuple):
    """A model that is ready to train in one mode."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], None]

    def step(self, loss: Tensor) -> None:
        self.backward(loss)
        self.optimizer.step()


def fp32(model: nn.Module) -> Training:
    return Training(model, FusedAdam(model.parameters()), lambda loss: loss.backward())


def fp16(model: nn.Module) -> Training:
    inner = FusedAdam(model.half().parameters())
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    return Training(model, optimizer, optimizer.backward)


def bf16(model: nn.Module) -> Training:
    inner = FusedAdam(model.bfloat16().parameters())
    optimizer = FP16_Optimizer(inner, static_loss_scale=1.0, verbose=False)
    return Training(model, optimizer, optimizer.backward)


def amp_init(model: nn.Module) -> Training:
    handle = amp.init(device_type=next(model.parameters()).device.type)
    optimizer = FusedAdam(model.parameters())

    def backward(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return Training(model, optimizer, backward)


def amp_level(level: str) -> Callable[[nn.Module], Training]:
    def build(model: nn.Module) -> Training:
        optimizer = FusedAdam(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

        def backward(loss: Tensor) -> None:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

        return Training(model, optimizer, backward)

    return build


MODES: dict[str, Callable[[nn.Module], Training]] = {
    "fp32": fp32,
    "fp16, FP16_Optimizer": fp16,
    "amp.init": amp_init,
    "amp O1": amp_level("O1"),
    "amp O2": amp_level("O2"),
    "bf16, FP16_Optimizer": bf16,
}


def measure_mode(task: Task, mode: str, device: str) -> dict[str, Any]:
    """Return what one mode holds of a model: state, and what each batch adds."""
    try:
        with torch.device(device):
            model = task.build()
        training = MODES[mode](model)
        state = measure_state(training)
        held = [measure_batch(task, training, batch, device) for batch in BATCHES]
        peak = measure_peak(task, training, BATCHES[-1]) if device == "cuda" else None
    finally:
        if _current.handle is not None:
            _current.handle._deactivate()
    first, second, third = (sum(each.values()) for each in held)
    per_sample = second - first
    fixed = first - BATCHES[0] * per_sample
    inputs = batch_of(task, training, 1, device)[0]
    return {
        "mode": mode,
        "state": state,
        "fixed": fixed,
        "per_sample": per_sample,
        "inputs": inputs.nbytes,
        "off_line": third - fixed - BATCHES[2] * per_sample,
        "by_module": by_module(held[0], held[1]),
        "peak": peak,
    }


def measure_state(training: Training) -> dict[str, int]:
    """Take a step that leaves the parameters' values, and return the bytes held before it ends.

    The gradients are zeros that went through the mode's own backward.
    """
    params = list(training.model.parameters())
    loss = sum((param.float().sum() for param in params), torch.zeros((), device=params[0].device))
    training.step(loss * 0.0)
    weights = [*params, *training.model.buffers()]
    grads = [grad for grad in map(stored_grad, params) if grad is not None]
    return memory_probe.held(weights, grads, training.optimizer)


def batch_of(task: Task, training: Training, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs, in float16 for a model that the user has halved, and labels."""
    inputs = task.inputs(batch).to(device)
    if isinstance(training.optimizer, FP16_Optimizer) and inputs.is_floating_point():
        inputs = inputs.to(next(training.model.parameters()).dtype)
    return inputs, torch.zeros(batch, dtype=torch.long, device=device)


def measure_batch(
    task: Task, training: Training, batch: int, device: str
) -> Counter[tuple[str, str]]:
    """Return the bytes that a batch holds for backward."""
    inputs, labels = batch_of(task, training, batch, device)
    model = training.model
    return memory_probe.held_for_backward(
        lambda: F.cross_entropy(model(inputs).float(), labels),
        [*model.parameters(), *model.buffers(), inputs, labels],
    )


def by_module(fewer: Counter[Any], more: Counter[Any]) -> list[dict[str, Any]]:
    """Return the bytes that one more sample holds, by class of module and dtype, largest first."""
    extra = {key: more[key] - fewer[key] for key in more}
    rows = sorted(extra.items(), key=lambda pair: (-pair[1], pair[0]))
    return [
        {"module": module, "dtype": dtype, "bytes": size} for (module, dtype), size in rows if size
    ]


def measure_peak(task: Task, training: Training, batch: int) -> dict[str, int]:
    """Return what torch's allocator gives out at most in a step on a GPU, with what was there."""
    inputs, labels = batch_of(task, training, batch, "cuda")
    training.optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step(F.cross_entropy(training.model(inputs).float(), labels))
    torch.cuda.synchronize()
    return {"batch": batch, "bytes": torch.cuda.max_memory_allocated()}


def largest_batch(row: dict[str, Any], budget: int) -> int:
    """Return how many samples fit: state, what is held for backward, and the inputs; 0 if none."""
    left = budget - sum(row["state"].values()) - row["fixed"]
    return max(0, left // (row["per_sample"] + row["inputs"]))


def measure(task: Task, device: str, budget: int) -> dict[str, Any]:
    """Return a row for each mode."""
    parameters = sum(param.numel() for param in task.build().parameters())
    rows = []
    for mode in MODES:
        print(f"{task.name}: {mode}", file=sys.stderr, flush=True)
        row = measure_mode(task, mode, device)
        rows.append(row | {"largest_batch": largest_batch(row, budget)})
        gc.collect()
    return {"model": task.name, "parameters": parameters, "rows": rows}


def size(text: str) -> int:
    """Return the bytes of a size such as 16 GiB.

    Raises:
        argparse.ArgumentTypeError: It is no positive number with a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", text.strip())
    if found is None or found[2] not in UNITS or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; it must be a positive number with one of {', '.join(UNITS)}, "
            "such as 16GiB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument(
        "--budget", type=size, default="16GiB", metavar="SIZE", help="of memory, as 24GiB [16GiB]"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it works")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for JSON and picture")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    torch.manual_seed(0)
    facts = environment(args.device)
    tasks = QUICK if args.quick else TASKS
    results: dict[str, Any] = {
        "environment": facts,
        "budget": args.budget,
        "models": [measure(task, args.device, args.budget) for task in tasks],
    }
    print(activation_report.page(results))
    folder = args.results or (Path("build") / "bench" if args.quick else RESULTS)
    slug = step_machine.slug(facts["device"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"activations-{slug}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, folder / "activations.png")
    return results


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart, or say why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        print("No chart: pip install matplotlib", file=sys.stderr)
        return
    from benchmarks import activation_chart  # Nothing else here needs matplotlib.

    activation_chart.draw(results, path)


if __name__ == "__main__":
    main()
