"""`python -m apex_mp`, and the script `apex_mp`: print what it runs on; exit with 1 if it cannot.

`run` runs a script, `check` reports what it needs, `report` prints what a Monitor has saved,
`estimate` the bytes and times of a model's training, `explain` what a warning means.
"""

from __future__ import annotations

import argparse
import os
import sys

from apex_mp._check import explain
from apex_mp._check.environment import survey
from apex_mp._run.command import main as run
from apex_mp._version import __version__


def console() -> None:
    """Run the script that pip installs: imports are found from the present folder, as by `-m`."""
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = os.getcwd()
    main()


def main() -> None:
    """Run the command that `sys.argv` names; without one print what apex_mp runs on."""
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if command == ["run"]:
        run(arguments)
        sys.exit()
    if command == ["check"]:
        from apex_mp._check.command import main as check

        sys.exit(check(arguments))
    if command == ["report"]:
        from apex_mp.monitor.command import main as report

        sys.exit(report(arguments))
    if command == ["estimate"]:
        from apex_mp._check.estimate import main as estimate

        sys.exit(estimate(arguments))
    if command == ["explain"]:
        sys.exit(explain.main(arguments))
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp",
        usage="%(prog)s [-h] [--version] [run ...] [check ...] [report ...] [estimate ...] "
        "[explain ...]",
        allow_abbrev=False,
        description="Without arguments: print what apex_mp runs on, and for what is missing the "
        "command that mends it. run: run an old script that says import apex; see "
        "python -m apex_mp run --help. check: say what a script or repository needs to run. "
        "report: print a training that apex_mp.monitor has saved. estimate: print the bytes and "
        "times of a model's training by each way. explain: print the section of "
        "the documentation that a warning names.",
    )
    parser.add_argument("--version", action="version", version=f"apex_mp {__version__}")
    _, words = parser.parse_known_args()
    if words:
        parser.error(
            f"{words[0]!r} is no command; it must be run, check, report, estimate or explain, or "
            "nothing"
        )
    found = survey()
    print(found)
    sys.exit(0 if found.usable else 1)


if __name__ == "__main__":
    main()
