"""See what mixed precision does: loss scale, skipped steps, gradient norms, where inf begins.

`docs/monitor.md` is the guide.
"""

from apex_mp.monitor._monitor import LossScaleExhaustedError, Monitor
from apex_mp.monitor.history import History, Step
from apex_mp.monitor.origin import Origin, Range, find_nonfinite

__all__ = [
    "History",
    "LossScaleExhaustedError",
    "Monitor",
    "Origin",
    "Range",
    "Step",
    "find_nonfinite",
]
