"""The command line of `python -m apex_mp check`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from apex_mp._check.report import examine


def main(arguments: Sequence[str]) -> int:
    """Print what a script or repository needs to run.

    Args:
        arguments: What follows `check` on the command line.

    Returns:
        0, or 1 if something in it will not work.
    """
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp check",
        allow_abbrev=False,
        description="Read Python code without running it, and say which names of apex it uses, "
        "which options of `run` it needs, what will not work, and the command to start with. The "
        "exit status is 1 if something will not work.",
    )
    parser.add_argument("path", type=Path, help="a script, or a folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if not options.path.exists():
        parser.error(f"path is {str(options.path)!r}; there is no such file or folder")
    report = examine(options.path)
    if not report.files:
        parser.error(f"path is {str(options.path)!r}; there is no Python file in it")
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(report.text(has_gpu=torch.cuda.is_available()))
    return 1 if report.unsupported else 0
