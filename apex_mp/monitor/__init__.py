"""See what mixed precision does: loss scale, skipped steps, gradient norms.

`docs/monitor.md` is the guide.
"""

from apex_mp.monitor._monitor import Monitor
from apex_mp.monitor.history import History, Step

__all__ = ["History", "Monitor", "Step"]
