"""Runs of rl_fp16.py side by side: a table, figures in JSON, and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[1]))
import machine

# What --compare runs.
COMPARED = (
    {"precision": "fp32", "masters": True},
    {"precision": "fp16", "masters": True},
    {"precision": "bf16", "masters": True},
    {"precision": "bf16", "masters": False},
)
SETTINGS = ("steps", "prompts", "group", "length", "width", "layers", "learning_rate", "loss_scale")
LAST = 10  # steps, whose mean reward is that of a run
# Okabe and Ito's colours, which people distinguish with any colour vision.
STYLES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#999999", "linewidth": 5.0},
    "fp16": {"color": "#0072b2", "linewidth": 1.8},
    "bf16": {"color": "#d55e00", "linewidth": 1.8},
    "bf16, no masters": {"color": "#d55e00", "linewidth": 1.8, "linestyle": (0, (1, 1.5))},
}
_NO_MISMATCH = (
    "There is no mismatch: sampling and training computed the same bits on this device. With a "
    "larger --width the order of additions differs."
)
LOOK = {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e8e8e8"}


def name_of(args: argparse.Namespace) -> str:
    return args.precision + ("" if args.masters else ", no masters")


def compare(args: argparse.Namespace, train: Callable[..., Any]) -> dict[str, Any]:
    """Train each precision from each seed, in turn, and return `summarise` of the runs."""
    runs: dict[str, list[Any]] = {}
    for seed in range(args.seed, args.seed + args.seeds):
        for flags in COMPARED:
            job = argparse.Namespace(**{**vars(args), **flags, "seed": seed})
            runs.setdefault(name_of(job), []).append(train(job))
    return summarise(runs, args)


def summarise(runs: dict[str, list[Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all runs: of each name a row with a value for each seed, and curves."""
    return {
        "environment": {
            **machine.describe(args.device),
            "settings": {name: getattr(args, name) for name in SETTINGS},
        },
        "rows": [{"run": name, **_row(of_seeds)} for name, of_seeds in runs.items()],
        "curves": {name: _curves(of_seeds) for name, of_seeds in runs.items()},
    }


def _row(runs: Sequence[Any]) -> dict[str, Any]:
    def each(figure: Callable[[list[Any]], float]) -> list[float]:
        return [_rounded(figure(run.steps)) for run in runs]

    return {
        "seeds": [run.args.seed for run in runs],
        "reward": each(lambda steps: np.mean([step.reward for step in steps[-LAST:]])),
        "mismatch": each(lambda steps: np.mean([step.mismatch for step in steps])),
        "largest_mismatch": each(lambda steps: max(step.largest_mismatch for step in steps)),
        "outside": each(lambda steps: np.mean([step.outside for step in steps])),
        "effective": each(lambda steps: np.mean([step.effective for step in steps])),
        "lost": each(lambda steps: np.mean([step.lost for step in steps])),
        "skipped": [sum(step.skipped for step in run.steps) for run in runs],
        "scale": [run.steps[-1].scale if run.scaler.is_enabled() else None for run in runs],
        "tokens_per_s": each(lambda steps: np.median([step.tokens_per_s for step in steps])),
    }


def _curves(runs: Sequence[Any]) -> dict[str, list[list[float]]]:
    return {
        name: [[_rounded(getattr(step, name)) for step in run.steps] for run in runs]
        for name in ("reward", "mismatch", "outside")
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# What is shown of the figures.


def table(results: dict[str, Any]) -> str:
    """Return the figures in Markdown, a column for each run, and what they are."""
    columns = [[row["run"], *_texts(row).values()] for row in results["rows"]]
    columns.insert(0, ["", *_texts(results["rows"][0])])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "| " + " | ".join(map(str.rjust, cells, widths)) + " |"
        for cells in zip(*columns, strict=True)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(
        [
            *lines,
            "",
            f"reward: mean of the last {LAST} steps.",
            "mismatch: |log-probability when trained - when drawn| of a token.",
            "outside: tokens whose ratio of the two probabilities leaves 1 +- 0.01.",
            "ESS lost: 1 - effective sample size of the answers / their number.",
            "updates lost: updates of weights that rounding loses.",
            *[_NO_MISMATCH] * (not any(any(row["largest_mismatch"]) for row in results["rows"])),
            "Means of the steps and seeds, but for largest (of all) and tokens/s (medians).",
        ]
    )


def _texts(row: dict[str, Any]) -> dict[str, str]:
    reward, scales = row["reward"], sorted({each for each in row["scale"] if each is not None})
    texts = {
        "reward": f"{np.mean(reward):.3f}",
        f"{len(reward)} seeds": f"{min(reward):.3f}-{max(reward):.3f}",
        "mismatch": f"{np.mean(row['mismatch']):.1e}",
        "largest": f"{max(row['largest_mismatch']):.1e}",
        "outside": f"{100 * np.mean(row['outside']):.1f} %",
        "ESS lost": f"{1 - np.mean(row['effective']):.1e}",
        "updates lost": f"{100 * np.mean(row['lost']):.0f} %",
        "skipped": f"{sum(row['skipped'])}",
        "final scale": "-".join(f"2^{np.log2(each):g}" for each in scales) or "none",
        "tokens/s": f"{np.mean(row['tokens_per_s']):.0f}",
    }
    return {name: text for name, text in texts.items() if name != "1 seeds"}


def write(results: dict[str, Any], path: Path) -> list[Path]:
    """Write the figures to `path`, the picture beside it, and return both paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results) + "\n")
    picture = path.with_suffix(".png")
    draw(results, picture)
    return [path, picture]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the reward and the mismatch by step: mean of the seeds, and the range they leave."""
    with rc_context(LOOK):
        figure = Figure(figsize=(11.5, 4.6), dpi=150, facecolor="white", layout="constrained")
        reward, mismatch, outside = figure.subplots(1, 3)
        with_masters = [name for name in results["curves"] if name in ("fp32", "fp16", "bf16")]
        _draw_curves(reward, results, "reward", [*results["curves"]])
        reward.set(title="Reward", xlabel="step", ylim=(None, 1.02))
        reward.legend(frameon=False)
        _draw_curves(mismatch, results, "mismatch", with_masters)
        mismatch.set(
            title="Sampler against trainer: mean difference\nof a token's log-probability",
            xlabel="step",
            yscale="log",
        )
        _draw_curves(outside, results, "outside", with_masters, 100.0)
        outside.set(title="% of tokens whose probability\nchanges by more than 1 %", xlabel="step")
        figure.suptitle(finding(results), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path)


def _draw_curves(
    axes: Axes, results: dict[str, Any], what: str, names: Sequence[str], factor: float = 1.0
) -> None:
    for name in names:
        values = factor * np.array(results["curves"][name][what])
        axes.plot(values.mean(0), label=name, **STYLES[name])
        color = STYLES[name]["color"]
        axes.fill_between(range(values.shape[1]), *_range(values), color=color, alpha=0.15, lw=0)
    axes.grid(axis="y")


def _range(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.min(0), values.max(0)


def finding(results: dict[str, Any]) -> str:
    """Return what the figures say of bf16 and fp16, in a sentence."""
    rows = {row["run"]: row for row in results["rows"]}
    half, brain = (np.mean(rows[name]["mismatch"]) for name in ("fp16", "bf16"))
    return (
        f"Sampler and trainer disagree {brain / half:.1f} times as much in bf16 as in fp16 "
        f"({brain:.1e} in log-probability)"
    )
