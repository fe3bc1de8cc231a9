"""`python -m apex_mp`: print what it runs on, exit with 1 if it cannot; `run`: run a script."""

import sys

from apex_mp import _extension
from apex_mp._environment import survey

if sys.argv[1:2] == ["run"]:
    try:
        _extension.load()
    except ImportError as error:
        sys.exit(f"apex_mp run: {error}")
    from apex_mp._run.command import main

    main(sys.argv[2:])
elif sys.argv[1:]:
    sys.exit(f"python -m apex_mp: {sys.argv[1]!r} is no command; it must be run, or nothing")
else:
    report = survey()
    print(report)
    sys.exit(0 if report.usable else 1)
