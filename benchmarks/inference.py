"""What a network that was trained in float32 loses and saves when its weights are rounded.

    python -m benchmarks.inference              print the table; write JSON
    python -m benchmarks.inference --quick      seconds, to see that it works

Two networks learn scikit-learn's handwritten digits in float32. The trained weights are rounded
to float16 and to bfloat16, and the same unseen digits are read in float32 and in each of these.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from apex_mp.optimizers import FusedAdam
from benchmarks.activation_models import ResNet
from benchmarks.amp import environment
from benchmarks.memory_probe import by_storage
from benchmarks.step_report import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def digits() -> Any:
    """Return examples/digits/digits_task.py: a network, and the scans."""
    sys.path.append(str(ROOT / "examples" / "digits"))
    try:
        return importlib.import_module("digits_task")
    finally:
        sys.path.pop()


class EnlargedResNet(nn.Module):
    """A residual network of six bottlenecks, on scans enlarged to 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet((2, 2, 2), 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(F.interpolate(images, scale_factor=4.0).expand(-1, 3, -1, -1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CNN of examples/digits.py": lambda: digits().DigitsNet(),
    "ResNet of 6 bottlenecks": EnlargedResNet,
}


def train(build: Callable[[], nn.Module], seed: int, epochs: int) -> nn.Module:
    """Return a network that was trained in float32."""
    task = digits()
    images, labels, _, _ = task.load_data("cpu")
    torch.manual_seed(seed)
    model = build()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    order = argparse.Namespace(seed=seed, epochs=epochs, batch_size=32, max_batches=None)
    for index in task.batches(len(images), order):
        F.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def read(model: nn.Module, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
    """Return the bytes of rounded weights and buffers, the digits that are read, and the labels."""
    rounded = copy.deepcopy(model).to(dtype)
    _, _, images, labels = digits().load_data("cpu")
    with torch.inference_mode():
        found = rounded(images.to(dtype)).argmax(1)
    kept = by_storage({"weights": [*rounded.parameters(), *rounded.buffers()]})
    return kept["weights"], found, labels


def measure(name: str, seeds: int, epochs: int) -> dict[str, Any]:
    """Return a row for each dtype, of networks from several seeds."""
    rows: dict[str, dict[str, Any]] = {
        name: {"weights": name, "accuracy": [], "changed": []} for name in DTYPES
    }
    for seed in range(seeds):
        print(f"{name}: seed {seed}", file=sys.stderr, flush=True)
        model = train(MODELS[name], seed, epochs)
        whole = read(model, torch.float32)[1]
        for dtype, row in rows.items():
            row["bytes"], found, labels = read(model, DTYPES[dtype])
            row["accuracy"].append((found == labels).double().mean().item())
            row["changed"].append(int((found != whole).sum()))
    return {"model": name, "images": len(labels), "rows": [*rows.values()]}


def page(results: dict[str, Any]) -> str:
    """Return the table, as docs/data.md shows it."""
    head = [
        "trained in fp32",
        "read with",
        "weights, kB",
        "of fp32's",
        "test accuracy, %",
        "changed",
    ]
    rows = [
        [
            model["model"],
            row["weights"],
            f"{row['bytes'] / 1e3:.1f}",
            f"{row['bytes'] / model['rows'][0]['bytes']:.2f}",
            f"{100 * mean(row['accuracy']):.2f}",
            f"{sum(row['changed'])} of {len(row['changed']) * model['images']}",
        ]
        for model in results["models"]
        for row in model["rows"]
    ]
    seeds = len(results["models"][0]["rows"][0]["accuracy"])
    said = f"torch {results['environment']['torch']}; test accuracy: mean of {seeds} seeds; "
    said += "changed: digits that are read otherwise than with fp32 weights."
    return "\n".join([said, "", *markdown(head, rows)])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for the JSON")
    args = parser.parse_args(argv)
    seeds, epochs = (1, 1) if args.quick else (3, 6)
    results = {
        "environment": environment("cpu"),
        "models": [measure(name, seeds, epochs) for name in MODELS],
    }
    print(page(results))
    folder = args.results or (Path("build") / "bench" if args.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1) + "\n"
    (folder / "inference-cpu.json").write_text(text, encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
