"""Whether the norms of apex_mp.normalization are as fast as torch's, and as exact as they may be.

    python -m benchmarks.normalization          print the table, write it to benchmarks/results/

Ours, torch's module given the same tensors, and torch's module around casts to float32 and back
take turns, round after round; the table gives medians, and medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from benchmarks.saved import measure_and_save
from benchmarks.step_device import seconds
from benchmarks.step_report import markdown

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = ((8 * 128, 768), (32 * 128, 1024))  # rows x width
CALLS = 5  # in one measurement
WAYS = ("ours", "torch", "cast")
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A module of ours, that of torch, and the dtypes of input and weights."""

    ours: type[nn.Module]
    torchs: type[nn.Module]
    input: torch.dtype
    weights: torch.dtype

    @property
    def output(self) -> torch.dtype:
        return self.weights if self.ours.__name__.startswith("Mixed") else self.input


CASES = [
    Case(ours, torchs, *dtypes)
    for ours, torchs in ((FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm))
    for dtypes in (
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    )
] + [
    Case(MixedFusedLayerNorm, nn.LayerNorm, torch.float16, torch.float32),
    Case(MixedFusedRMSNorm, nn.RMSNorm, torch.float16, torch.float32),
]


def ways_of(case: Case, width: int, device: str) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """Return for each way the module, and what maps an input to the output."""
    ours = case.ours(width, eps=1e-5).to(device, case.weights)
    theirs = case.torchs(width, eps=1e-5).to(device, case.weights)
    wide = copy.deepcopy(theirs).float()
    ways: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"ours": (ours, ours)}
    if case.output is case.input:  # Otherwise torch has but the cast.
        ways["torch"] = (theirs, theirs)
    if case.input is not torch.float32:
        ways["cast"] = (wide, lambda x: wide(x.float()).to(case.output))
    return ways


def measure(case: Case, rows: int, width: int, device: str, rounds: int) -> dict[str, Any]:
    """Return median milliseconds of each way, ratios to ours, and how far gradients are off."""
    x = torch.randn(rows, width, device=device).to(case.input).requires_grad_()
    # A mean, as the gradient of a bias has: a sum of it alone would stay near to none.
    grad = (torch.randn(rows, width, device=device) + 0.1).to(case.output)
    ways = ways_of(case, width, device)

    def forward(run: Callable[..., Any]) -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                run(x)

    def both(run: Callable[..., Any]) -> None:
        for _ in range(CALLS):
            run(x).backward(grad)

    kinds = {"forward": forward, "both": both}
    with warnings.catch_warnings():  # torch says that its RMS norm of two dtypes is not fused.
        warnings.simplefilter("ignore", UserWarning)
        ways = {name: way for name, way in ways.items() if _runs(way[1], x)}
        times: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in ways} for kind in kinds
        }
        for number in range(rounds + 1):
            for kind, work in kinds.items():
                # Who comes first meets other caches: each way does, in turn.
                for name, (module, run) in _turned(ways, number):
                    took = seconds(lambda work=work, run=run: work(run), device)
                    module.zero_grad()
                    x.grad = None
                    if number:  # The first warms up.
                        times[kind][name].append(1e3 * took / CALLS)
        off = {name: gradients_off(module, run, x, grad) for name, (module, run) in ways.items()}
    return {
        "norm": case.ours.__name__,
        "input": NAMES[case.input],
        "weights": NAMES[case.weights],
        "rows": rows,
        "width": width,
        "ms": {kind: {name: statistics.median(t) for name, t in of.items()}
               for kind, of in times.items()},
        "times_ours": {
            kind: {
                name: statistics.median(a / b for a, b in zip(of[name], of["ours"], strict=True))
                for name in ways
            }
            for kind, of in times.items()
        },
        "off": off,
    }  # fmt: skip


def _turned(ways: dict[str, Any], number: int) -> list[tuple[str, Any]]:
    listed = [*ways.items()]
    first = number % len(listed)
    return listed[first:] + listed[:first]


def _runs(run: Callable[..., Any], x: Tensor) -> bool:
    try:
        run(x)
    except RuntimeError:  # torch's layer norm of two dtypes on CUDA
        return False
    return True


def gradients_off(module: nn.Module, run: Callable[..., Any], x: Tensor, grad: Tensor) -> float:
    """Return the largest error of the weights' gradients, as a part of the largest gradient."""
    module.zero_grad()
    run(x.detach()).backward(grad)
    wide = copy.deepcopy(module).double()
    wide.zero_grad()
    wide(x.detach().double()).backward(grad.double())
    parts = []
    for mine, exact in zip(module.parameters(), wide.parameters(), strict=True):
        if mine.grad is None or exact.grad is None:
            raise RuntimeError(f"{type(module).__name__}: a parameter has no gradient")
        error = (mine.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        parts.append(error.item())
    return max(parts)


def page(results: dict[str, Any]) -> str:
    """Return the table, as docs/data.md shows it."""
    facts = results["environment"]
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    said = f"{where}, torch {facts['torch']}, threads: {facts['threads']}"
    head = [
        "module", "input, weights", "rows x width",
        "forward, ms", "torch", "cast", "with backward, ms", "torch", "cast",
        "gradients off", "torch",
    ]  # fmt: skip
    rows = [
        [
            run["norm"],
            f"{run['input']}, {run['weights']}",
            f"{run['rows']} x {run['width']}",
            *(
                cell
                for kind in ("forward", "both")
                for cell in (
                    f"{run['ms'][kind]['ours']:.2f}",
                    *(_number(run["times_ours"][kind], way, ".2f") for way in WAYS[1:]),
                )
            ),
            *(_number(run["off"], way, ".0e") for way in WAYS[:2]),
        ]
        for run in results["runs"]
    ]
    return "\n".join([said, "", *markdown(head, rows)])


def _number(of: dict[str, float], way: str, form: str) -> str:
    return format(of[way], form) if way in of else ""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    shapes = {"nargs": "+", "metavar": "ROWSxWIDTH", "type": _shape, "default": [*SHAPES]}
    parser.add_argument("--shapes", **shapes)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    torch.manual_seed(0)

    def measured() -> dict[str, Any]:
        pairs = [(case, shape) for case in CASES for shape in args.shapes]
        return {"runs": [measure(case, *shape, args.device, args.rounds) for case, shape in pairs]}

    path = str(args.results / "normalization-{}.json")
    return measure_and_save(path, args.device, measured, page)


def _shape(text: str) -> tuple[int, int]:
    rows, width = map(int, text.split("x"))
    return rows, width


if __name__ == "__main__":
    main()
