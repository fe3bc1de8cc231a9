"""`python -m apex_mp report run.json`: print or draw a run that Monitor.save has written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from apex_mp.monitor import _report
from apex_mp.monitor.history import History


def main(arguments: Sequence[str]) -> int:
    """Print the report of a file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp report",
        allow_abbrev=False,
        description="Print what apex_mp.monitor.Monitor.save has written: loss scale, skipped "
        "steps, gradient norms, and which parameters overflowed.",
    )
    parser.add_argument("file", help="a JSON file of Monitor.save")
    parser.add_argument("--plot", metavar="FILE", help="also write a picture, for example run.png")
    given = parser.parse_args(arguments)
    try:
        history = History.load(given.file)
        print(_report.text(history))
        if given.plot is not None:
            from apex_mp.monitor import _picture  # Matplotlib need not be there for the text.

            _picture.draw(history, given.plot)
    except (OSError, ValueError, ImportError) as error:
        print(f"python -m apex_mp report: {error}", file=sys.stderr)
        return 1
    return 0
