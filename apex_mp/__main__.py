"""`python -m apex_mp`: print what it runs on; exit with 1 if it cannot run.

`run` runs a script, `check` reports what it needs, `report` prints what a Monitor has saved.
"""

import argparse
import sys

from apex_mp._check.environment import survey
from apex_mp._run.command import main
from apex_mp._version import __version__

if sys.argv[1:2] == ["run"]:
    main(sys.argv[2:])
    sys.exit()
if sys.argv[1:2] == ["check"]:
    from apex_mp._check.command import main as check_main

    sys.exit(check_main(sys.argv[2:]))
if sys.argv[1:2] == ["report"]:
    from apex_mp.monitor.command import main as report_main

    sys.exit(report_main(sys.argv[2:]))
parser = argparse.ArgumentParser(
    prog="python -m apex_mp",
    usage="%(prog)s [-h] [--version] [run ...] [check ...] [report ...]",
    allow_abbrev=False,
    description="Without arguments: print what apex_mp runs on, and for what is missing the "
    "command that mends it. run: run an old script that says import apex; see "
    "python -m apex_mp run --help. check: say what a script or repository needs to run. report: "
    "print a training that apex_mp.monitor has saved.",
)
parser.add_argument("--version", action="version", version=f"apex_mp {__version__}")
_, words = parser.parse_known_args()
if words:
    parser.error(f"{words[0]!r} is no command; it must be run, check or report, or nothing")
report = survey()
print(report)
sys.exit(0 if report.usable else 1)
