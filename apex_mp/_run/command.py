"""The command line of `python -m apex_mp run`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from apex_mp._as_apex import evidence
from apex_mp._as_apex.eras import ERAS
from apex_mp._run.settings import Settings
from apex_mp.core import extension
from apex_mp.core.spelling import did_you_mean

_WITH_VALUE = ("--era", "--device", "--dtype", "--init-scale")


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module as python itself would, with the name apex installed."""
    parser = _parser()
    ours, theirs = _split(arguments)
    options, unknown = parser.parse_known_args(ours)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        meant = did_you_mean(unknown[0].partition("=")[0], flags)
        parser.error(f"there is no option {unknown[0]}{meant}")
    if (options.init_scale is not None or options.strict) and not options.master_weights:
        parser.error("--init-scale and --strict need --master-weights")
    if options.init_scale is not None and not 0.0 < options.init_scale < math.inf:
        parser.error(f"--init-scale is {options.init_scale}; it must be more than 0")
    is_module = theirs[:1] == ["-m"]
    if not theirs[is_module:]:
        parser.error("there is nothing to run; give a script, or -m and a module")
    name, *rest = theirs[is_module:]
    try:
        extension.load()
    except ImportError as error:
        sys.exit(f"apex_mp run: {error}")
    # Imported here: without the extension this fails, but help must be printed all the same.
    from apex_mp._run import main_module
    from apex_mp._run.apply import apply

    era = _era(name, is_module) if options.era == "auto" else options.era
    settings = Settings(
        era,
        options.force,
        options.device,
        options.modernize,
        options.dtype,
        options.master_weights,
        options.init_scale,
        options.strict,
        not options.no_apex,
    )
    program = main_module.Target(name, is_module=is_module)
    program.take_over(rest)
    settings.hand_to_children()
    try:
        apply(settings, child=False)
    except RuntimeError as error:
        sys.exit(str(error))
    try:
        program.execute(settings)
    except SystemExit as ended:
        late = [word for word in rest if word.partition("=")[0] in parser._option_string_actions]
        if ended.code == 2 and late:  # argparse's status for what it does not know
            print(
                f"apex_mp run: {late[0]} was given to the script; an option of run stands before "
                "the script",
                file=sys.stderr,
            )
        raise


def _era(name: str, is_module: bool) -> str:
    """Return the era that a script was written for, and print the evidence."""
    script = Path(name)
    if is_module:
        found, imports = evidence.in_module(name)
    elif script.is_file():
        found, imports = evidence.in_program(script, script.parent)
    else:
        found, imports = [], set()
    found = found or evidence.in_libraries(imports, script.parent)
    era = evidence.era_of(found)
    for each in (each for each in found if era in each.eras):
        print(f"apex_mp run: --era {era}, by {each.what} at {each.where}", file=sys.stderr)
        break
    return era


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our options, and the target with all its arguments, which are not parsed.

    As for python, `-m` is the last option and may be joined with its module, and `--` may end the
    options. argparse would remove a `--` among the script's arguments.
    """
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return [*arguments[:index]], [*arguments[index + 1 :]]
        if word.startswith("-m"):
            module = [word[2:]] if word[2:] else []
            return [*arguments[:index]], ["-m", *module, *arguments[index + 1 :]]
        if not word.startswith("-") or word == "-":
            break
        index += 2 if word in _WITH_VALUE else 1
    return [*arguments[:index]], [*arguments[index:]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp run",
        usage="%(prog)s [-h] [--era ERA] [--device cpu] [--dtype bfloat16] [--modernize]\n"
        "       [--force] [--master-weights[=float32]] [--init-scale SCALE] [--strict]\n"
        "       [--no-apex] (script.py | -m module) [what it is given ...]",
        allow_abbrev=False,
        description="Run an unmodified script: import apex finds apex_mp, and with "
        "--master-weights a script of today trains 16-bit weights; here and in child processes.",
    )
    parser.add_argument(
        "--era",
        choices=["auto", *ERAS],
        default="auto",
        help="whose apex the script knows [auto: by names and arguments, else 2019-03]",
    )
    parser.add_argument(
        "--device", choices=["cpu"], help="cpu: run on the CPU what the script puts on a GPU"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16"],
        help="bfloat16: cast to it what the script casts to float16",
    )
    parser.add_argument(
        "--modernize",
        action="store_true",
        help="supply what later versions of Python, numpy and torch took away",
    )
    parser.add_argument(
        "--master-weights",
        nargs="?",
        const=True,
        default=False,
        choices=[True, "split", "float32"],
        metavar="float32",
        help="for scripts of today: 16-bit weights get float32 masters, and torch's GradScaler is "
        "apex_mp's, which takes float16 gradients; =float32 keeps whole masters [=split: what "
        "weights do not hold of them]",
    )
    parser.add_argument(
        "--init-scale",
        type=float,
        help="with --master-weights: the first scale of each GradScaler [the script's]",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --master-weights: end with status 3 if a 16-bit parameter was stepped without a "
        "master",
    )
    parser.add_argument(
        "--no-apex",
        action="store_true",
        help="do not install the name apex, for scripts whose libraries look whether it is there",
    )
    parser.add_argument(
        "--force", action="store_true", help="hide an apex that is installed, for this run"
    )
    return parser
