"""Watch mixed precision: loss scale, skipped steps, norms, exponents, and where inf begins.

`docs/monitor.md` is the guide.
"""

from apex_mp.monitor._monitor import LossScaleExhaustedError, Monitor
from apex_mp.monitor._ranges import Range
from apex_mp.monitor.exponents import Exponents, Sample
from apex_mp.monitor.history import History, Step
from apex_mp.monitor.origin import Origin, find_nonfinite
from apex_mp.monitor.updates import LostUpdates, lost_updates

__all__ = [
    "Exponents",
    "History",
    "LossScaleExhaustedError",
    "LostUpdates",
    "Monitor",
    "Origin",
    "Range",
    "Sample",
    "Step",
    "find_nonfinite",
    "lost_updates",
]
