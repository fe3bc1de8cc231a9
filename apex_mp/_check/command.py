"""The command line of `python -m apex_mp check`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from apex_mp._check.report import examine

_MANY_FILES, _WIDTH = 500, 40


def main(arguments: Sequence[str]) -> int:
    """Print what a script or repository needs to run.

    Returns:
        0; 1 if a script will not work; 3 if only its own CUDA code will not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp check",
        allow_abbrev=False,
        description="Read Python code without running it, and say which names of apex it uses, "
        "which options of `run` it needs, what will not work, and the command to start with. The "
        "exit status is 1 if a script will not work, 3 if only its own CUDA code will not, else 0.",
    )
    parser.add_argument("path", type=Path, help="a script, or a folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if not os.path.exists(options.path):  # Of a link to itself Path.exists raises.
        parser.error(f"path is {str(options.path)!r}; there is no such file or folder")
    report = examine(options.path, _show_progress if sys.stderr.isatty() else None)
    if not report.files:
        parser.error(f"path is {str(options.path)!r}; there is no Python file in it")
    if isinstance(sys.stdout, io.TextIOWrapper):  # Names of files may be no text.
        sys.stdout.reconfigure(errors="backslashreplace")
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(report.text(has_gpu=torch.cuda.is_available()))
    return report.status


def _show_progress(done: int, of: int) -> None:
    """Draw a bar in a terminal, in its last line."""
    if of < _MANY_FILES or (done % 50 and done < of):
        return
    width = _WIDTH * done // of
    end = "\r" if done < of else "\r\033[K"
    bar = f"reading [{'#' * width}{' ' * (_WIDTH - width)}] {done} of {of} files"
    print(bar if done < of else "", end=end, file=sys.stderr, flush=True)
