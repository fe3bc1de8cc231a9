"""Compare runs of main_amp.py and main_fp16_optimizer.py by the checkpoints that they have saved.

    compare.py RUN/checkpoint.pth.tar OTHER/checkpoint.pth.tar --plot curves.png

The table has a line for each run, and the picture the losses of each epoch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from training import COLUMNS, table

from apex_mp.checkpoint import load_checkpoint

mpl.use("Agg")
from matplotlib import pyplot as plt

LAST = ("train loss", "val loss", "val top-1", "val top-5", "loss scale")


def line(run: dict[str, Any]) -> dict[str, str]:
    """A run as a line of the table: its last epoch, and its median speed."""
    rows = run["rows"]
    speed = statistics.median(row["images/s"] for row in rows)
    last = {name: f"{rows[-1][name]:.{COLUMNS[name]}f}" for name in LAST}
    return {"run": run["run"]["API"], "epochs": str(len(rows)), **last, "images/s": f"{speed:.0f}"}


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, ("train loss", "val loss"), strict=True):
        for number, run in enumerate(runs):
            style, label = ("-", "--", ":", "-.")[number % 4], run["run"]["API"]
            axis.semilogy([row[name] for row in run["rows"]], style, label=label)
        axis.set(title=name, xlabel="epoch")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="checkpoint.pth.tar")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture")
    args = parser.parse_args(argv)
    runs = [load_checkpoint(path) for path in args.runs]
    for path, run in zip(args.runs, runs, strict=True):
        if "rows" not in run:
            sys.exit(f"{path}: it must be a checkpoint of main_amp.py or main_fp16_optimizer.py")
    print(table([line(run) for run in runs]))
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
