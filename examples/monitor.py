"""Moved to examples/monitor/monitor.py."""

import sys

sys.exit("examples/monitor.py has moved: python examples/monitor/monitor.py")
