"""Compare runs of main_amp.py and main_fp16_optimizer.py by the checkpoints that they have saved.

    compare.py RUN/checkpoint.pth.tar OTHER/checkpoint.pth.tar --plot curves.png

The table has a line for each run, and the picture the losses of each epoch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from training import COLUMNS, table

from apex_mp.checkpoint import load_checkpoint

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's colours; the first is broad, since the others lie on it.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#b8b8b8", "linewidth": 6.0},
    {"color": "#0072b2", "linewidth": 1.8},
    {"color": "#e69f00", "linewidth": 1.8, "linestyle": "--"},
    {"color": "#009e73", "linewidth": 1.8, "linestyle": ":"},
)
LOOK = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
}
LAST = ("train loss", "val loss", "val top-1", "val top-5", "loss scale")


def line(run: dict[str, Any]) -> dict[str, str]:
    """A run as a line of the table: its last epoch, and its median speed."""
    rows = run["rows"]
    speed = statistics.median(row["images/s"] for row in rows)
    last = {name: f"{rows[-1][name]:.{COLUMNS[name]}f}" for name in LAST}
    return {"run": run["run"]["API"], "epochs": str(len(rows)), **last, "images/s": f"{speed:.0f}"}


def finding(runs: list[dict[str, Any]]) -> str:
    """Return what the picture shows, in a sentence."""
    last = [run["rows"][-1]["val loss"] for run in runs]
    return (
        f"{len(runs)} ways to train end at validation losses of {min(last):.3f} to {max(last):.3f}"
    )


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    with mpl.rc_context(LOOK):
        figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.6), layout="constrained")
        titles = {"train loss": "Training loss", "val loss": "Validation loss"}
        for axis, (name, title) in zip(axes, titles.items(), strict=True):
            for run, style in zip(runs, itertools.cycle(STYLES)):
                axis.semilogy([row[name] for row in run["rows"]], label=run["run"]["API"], **style)
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set(title=title, xlabel="epoch")
            axis.grid(axis="y")
        axes[0].legend(frameon=False)
        figure.suptitle(finding(runs), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=140)
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
