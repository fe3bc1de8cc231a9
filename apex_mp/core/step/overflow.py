"""The message of a skipped step: which parameters' gradients held inf or NaN."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from apex_mp.core.grads.checks import NonFinite
from apex_mp.core.log import counted

_PARAMETERS_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Overflow:
    """Gradients that hold inf or NaN.

    Attributes:
        report: Which gradients hold how many, the worst first.
        scale_before: The loss scale of these gradients.
        scale_after: The next loss scale.
    """

    report: Sequence[NonFinite]
    scale_before: float
    scale_after: float

    def log(self, logger: logging.Logger, message: str) -> None:
        """Log a message with the worst parameters under it; the record has `overflow`."""
        worst = [f"  {found}" for found in self.report[:_PARAMETERS_NAMED]]
        others = len(self.report) - _PARAMETERS_NAMED
        rest = [f"  and {counted(others, 'more parameter')}"] if others > 0 else []
        logger.warning("%s", "\n".join([message, *worst, *rest]), extra={"overflow": self})
