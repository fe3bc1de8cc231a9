"""What amp.init() costs: forward and backward against torch.autocast and plain float32.

    python -m benchmarks.amp                    print the table
    python -m benchmarks.amp --save-results benchmarks/results/amp-cpu.json

All ways to run a model take turns, round after round, so that a busy machine is busy for each. On
a CPU the time of the process counts, without what other programs take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp import _C, amp

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
REFERENCE = "torch.autocast"
RATIOS = [
    ("amp.init", REFERENCE),
    ("NoOpHandle", "fp32"),
    ("amp.init", "fp32"),
]


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class LastStep(nn.Module):
    """A recurrent layer that gives its whole output and keeps its state to itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the shape of its input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                         nn.Linear(512, 10))  # fmt: skip


def _transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)


WORKLOADS = [
    Workload("MLP", _mlp, (64, 256)),
    Workload("ResNet block", lambda: ResidualBlock(32), (8, 32, 16, 16)),
    Workload("transformer layer", _transformer_layer, (4, 32, 128)),
    Workload("LSTM", lambda: LastStep(nn.LSTM(64, 64, batch_first=True)), (8, 32, 64)),
]


@contextlib.contextmanager
def initialised(enabled: bool, dtype: torch.dtype, device: str) -> Iterator[None]:
    """Run a block under amp.init()."""
    handle = amp.init(enabled, dtype=dtype, device_type=device)
    try:
        yield
    finally:
        handle._deactivate()


def contexts(
    dtype: torch.dtype, device: str
) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Each way to run a model, as a context around forward and backward."""
    return {
        "fp32": contextlib.nullcontext,
        "NoOpHandle": lambda: initialised(False, dtype, device),
        REFERENCE: lambda: torch.autocast(device, dtype=dtype),
        "amp.init": lambda: initialised(True, dtype, device),
    }


def time_one(model: nn.Module, x: Tensor, way: str, context: Any) -> float:
    """Milliseconds of a forward and backward: the best of three, or of all within 30 ms.

    Python specialises its bytecode anew after `init()`, which takes some dozens of calls.
    """
    times: list[float] = []
    clock = time.perf_counter if x.is_cuda else time.process_time
    with contextlib.ExitStack() as stack:
        if way != REFERENCE:  # init() lasts for a whole script; its own cost is not a step's.
            stack.enter_context(context())
        while len(times) < 3 or sum(times) < 0.03:
            model.zero_grad()
            begin = clock()
            with context() if way == REFERENCE else contextlib.nullcontext():
                loss = model(x).float().square().mean()
            loss.backward()
            if x.is_cuda:
                torch.cuda.synchronize()
            times.append(clock() - begin)
    return min(times) * 1e3


def measure(workload: Workload, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    """Times of all ways in turn: the median of each, and its ratio to autocast round by round."""
    torch.manual_seed(0)
    model = workload.make().to(device)
    x = torch.randn(workload.shape, device=device)
    ways = contexts(dtype, device)
    times: dict[str, list[float]] = {way: [] for way in ways}
    failures: dict[str, str] = {}
    for number in range(rounds + 1):
        # Each way follows now one of its neighbours, now the other.
        for way, context in [*ways.items()][:: 1 if number % 2 else -1]:
            if way in failures:
                continue
            try:
                took = time_one(model, x, way, context)
            except RuntimeError as error:  # torch.autocast has no fp16 LSTM on a CPU.
                failures[way] = str(error).splitlines()[0]
                continue
            if number:  # The first round warms up.
                times[way].append(took)
    return {
        "model": workload.name,
        "ms": {way: statistics.median(took) for way, took in times.items() if took},
        "ratio": {
            f"{one} / {other}": _ratio(times[one], times[other])
            for one, other in RATIOS
            if one in ways and other in ways
        },
        "failures": failures,
    }


def _ratio(times: Sequence[float], reference: Sequence[float]) -> float | None:
    if len(times) != len(reference) or not times:
        return None
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def table(results: dict[str, Any]) -> str:
    """Render the results as a Markdown table."""
    ways = [*contexts(torch.float16, "cpu")]
    ratios = [name for name in results["rows"][0]["ratio"] if name != "amp.init / fp32"]
    head = ["dtype", "model", *(f"{way}, ms" for way in ways), *ratios]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for row in results["rows"]:
        cells = [f"{row['ms'][way]:.2f}" if way in row["ms"] else "fails" for way in ways]
        cells += ["" if row["ratio"][r] is None else f"{row['ratio'][r]:.2f}" for r in ratios]
        lines.append(f"| {row['dtype']} | {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def environment(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "processor": _processor(),
        "cpu_level": _C.cpu_level(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--rounds", type=int, default=31, help="of which medians are taken")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--save-results", type=Path, metavar="JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    rows = [
        {
            "dtype": name,
            **measure(workload, DTYPES[name], args.device, args.rounds),
        }
        for name in args.dtypes
        for workload in WORKLOADS
    ]
    results = {"environment": {**environment(args.device), "rounds": args.rounds}, "rows": rows}
    print(table(results))
    for row in rows:
        for way, message in row["failures"].items():
            print(f"{row['dtype']} {row['model']} under {way}: {message}")
    if args.save_results is not None:
        args.save_results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
