"""The command line of `python -m apex_mp run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from apex_mp._as_apex.eras import ERAS
from apex_mp._run import main_module
from apex_mp._run.apply import apply
from apex_mp._run.settings import Settings


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module as python itself would, with the name apex installed.

    Args:
        arguments: What follows `run` on the command line.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = Settings(options.era, options.force, options.device, options.modernize)
    target = main_module.Target(options.target, is_module=options.m)
    target.take_over(options.arguments)
    settings.hand_to_children()
    try:
        apply(settings, child=False)
    except RuntimeError as error:
        sys.exit(str(error))
    target.execute()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp run",
        description="Run an unmodified script of 2018-2019: import apex finds apex_mp, here and in "
        "child processes.",
    )
    parser.add_argument(
        "--era", choices=ERAS, default="2019-03", help="whose apex the script knows [2019-03]"
    )
    parser.add_argument(
        "--device", choices=["cpu"], help="cpu: run on the CPU what the script puts on a GPU"
    )
    parser.add_argument(
        "--modernize",
        action="store_true",
        help="supply what later versions of Python, numpy and torch took away",
    )
    parser.add_argument(
        "--force", action="store_true", help="hide an apex that is installed, for this run"
    )
    parser.add_argument("-m", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument("target", metavar="script.py | -m module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    return parser
