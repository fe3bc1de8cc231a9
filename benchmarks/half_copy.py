"""Whether FusedAdam should write float32 weights in half precision too, for amp.init to use.

    python -m benchmarks.half_copy              print the table, write it to benchmarks/results/

amp.init casts a weight when a forward first uses it: 6 bytes a parameter. A step could write that
copy while it has the weight at hand: 2 bytes. What this can save is what the cast takes, less what
the longer step takes. All take turns, round after round; the table gives medians.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apex_mp import amp
from apex_mp.optimizers import FusedAdam
from benchmarks.saved import measure_and_save
from benchmarks.step_device import seconds
from benchmarks.step_report import markdown

RESULTS = Path(__file__).resolve().parent / "results"
TIMED = ("iteration", "weights to half", "step", "step that writes half")


def measure(device: str, *, layers: int, width: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return median milliseconds of each of TIMED, for the layers of a transformer.

    Args:
        device: Where; in float16 on CUDA, in bfloat16 on the CPU.
        layers: How many layers.
        width: Of each; the feed-forward part is four times as wide.
        tokens: In a batch of 4.
        rounds: Of which medians are taken.
    """
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    params = list(model.parameters())
    optimizer = FusedAdam(params, lr=1e-5)
    batch = torch.randn(4, tokens, width, device=device)
    copies = [torch.empty_like(param, dtype=dtype) for param in params]

    def iterate() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    work = {
        "iteration": iterate,
        "weights to half": lambda: [param.to(dtype) for param in params],
        "step": optimizer.step,
        "step that writes half": lambda: optimizer.step(output_params=copies),
    }
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    handle = amp.init(dtype=dtype)
    try:
        for round_number in range(rounds + 1):
            for name in TIMED:
                with torch.set_grad_enabled(name == "iteration"):
                    took = seconds(work[name], device)
                if round_number:  # The first warms up.
                    times[name].append(1e3 * took)
    finally:
        handle._deactivate()
    return {
        "parameters": sum(param.numel() for param in params),
        "tokens": 4 * tokens,
        "ms": {name: statistics.median(each) for name, each in times.items()},
    }


def saved(ms: dict[str, float]) -> float:
    """Return milliseconds that an iteration would save at best."""
    return ms["weights to half"] - (ms["step that writes half"] - ms["step"])


def page(results: dict[str, Any]) -> str:
    """Return the table, as docs/data.md shows it."""
    facts, runs = results["environment"], results["runs"]
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    rows = [
        [
            str(run["tokens"]),
            *(f"{run['ms'][name]:.1f}" for name in TIMED),
            f"{saved(run['ms']):.1f}",
            f"{100 * saved(run['ms']) / run['ms']['iteration']:.1f} %",
        ]
        for run in runs
    ]
    head = ["tokens", *(f"{name}, ms" for name in TIMED), "saved at best, ms", "of it"]
    said = (
        f"{where}, torch {facts['torch']}; layers of a transformer, "
        f"{runs[0]['parameters'] / 1e6:.0f} M parameters"
    )
    return "\n".join([said, "", *markdown(head, rows)])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    tokens = {"type": int, "nargs": "+", "default": [32, 128, 512]}
    parser.add_argument("--tokens", **tokens, help="in each sequence of a batch of 4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    size = {"layers": args.layers, "width": args.width, "rounds": args.rounds}

    def measured() -> dict[str, Any]:
        return {"runs": [measure(args.device, tokens=each, **size) for each in args.tokens]}

    path = str(args.results / "half-copy-{}.json")
    return measure_and_save(path, args.device, measured, page)


if __name__ == "__main__":
    main()
