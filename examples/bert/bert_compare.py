"""What bert.py --compare does: the same training by each API; a table."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bert_apis import APIS


def summary(run: Any) -> dict[str, Any]:
    """Return what the table shows of a training."""
    return {
        "accuracy": run.evaluate()[0],
        "seconds": statistics.median(run.seconds),
        "skipped": run.skipped,
        "steps": run.steps,
    }


def compare(
    args: argparse.Namespace, train: Callable[[argparse.Namespace], dict[str, Any]]
) -> Iterator[str]:
    """Train by each API with each seed, each in a new process; yield the lines of a table.

    Args:
        args: The flags.
        train: Trains once with such flags, and returns the `summary`.
    """
    yield f"| {'--amp':14} | dev accuracy, % | seconds per epoch | skipped steps |"
    yield f"| {'-' * 14} | {'-' * 14}: | {'-' * 16}: | {'-' * 12}: |"
    # amp changes functions of torch for a whole process; and modules are imported only once.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in APIS:
            runs = pool.map(
                train,
                [
                    argparse.Namespace(**{**vars(args), "amp": name, "seed": args.seed + seed})
                    for seed in range(args.seeds)
                ],
                chunksize=1,
            )
            found = [100 * run["accuracy"] for run in runs]
            skipped = sum(run["skipped"] for run in runs)
            cells = (
                f"{name:14}",
                f"{statistics.mean(found):.1f} ({min(found):.0f}-{max(found):.0f})".rjust(15),
                f"{statistics.median(run['seconds'] for run in runs):17.1f}",
                f"{skipped}/{sum(run['steps'] for run in runs)}".rjust(13),
            )
            yield f"| {' | '.join(cells)} |"
