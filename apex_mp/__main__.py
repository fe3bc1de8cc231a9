"""Print what apex_mp runs on: `python -m apex_mp`. Exits with 1 if it cannot run."""

import sys

from apex_mp._environment import survey

report = survey()
print(report)
sys.exit(0 if report.usable else 1)
