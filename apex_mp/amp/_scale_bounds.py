"""Bounds and hysteresis of a GradScaler's scale, which torch's does not have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp import _ops
from apex_mp.loss_scale import FLOAT32_SMALLEST_NORMAL, DynamicLossScale


@dataclasses.dataclass
class ScaleBounds:
    """What changes the rule of a GradScaler; without any of it torch's rule holds to the bit.

    Attributes:
        min_scale: The scale does not back off below this; None: no bound.
        max_scale: The scale does not grow above this; None: no bound.
        hysteresis: Overflows before the scale backs off.
        overflows: State: overflows since the scale changed; a tensor beside the scale, if it is
            known where that is.
    """

    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    overflows: int | Tensor = 0

    def __bool__(self) -> bool:
        return (self.min_scale, self.max_scale, self.hysteresis) != (None, None, 1)

    def check(self, init_scale: float, factors: Mapping[str, Any]) -> None:
        """Raise a TypeError or ValueError for a number that is out of range.

        Args:
            init_scale: The first scale.
            factors: `growth_factor`, `backoff_factor` and `growth_interval`.
        """
        given = {name: getattr(self, name) for name in ("min_scale", "max_scale")}
        bounds: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        DynamicLossScale(init_scale, hysteresis=self.hysteresis, **bounds, **factors)

    def update(
        self, scale: Tensor, good_steps: Tensor, found_inf: Tensor, factors: Mapping[str, Any]
    ) -> None:
        """Adjust the scale where it lies, by the rule of `DynamicLossScale`.

        Args:
            scale: 0-dim float32; written.
            good_steps: 0-dim int32; written.
            found_inf: 0-dim float32, not 0 if a step was skipped.
            factors: As in `check`.
        """
        if not isinstance(self.overflows, Tensor):
            self.overflows = torch.full_like(good_steps, self.overflows)
        _ops.update_scale_(
            scale,
            good_steps,
            self.overflows,
            found_inf,
            min_scale=FLOAT32_SMALLEST_NORMAL if self.min_scale is None else self.min_scale,
            max_scale=math.inf if self.max_scale is None else self.max_scale,
            hysteresis=self.hysteresis,
            **factors,
        )

    def state(self) -> dict[str, Any]:
        """Return all of it as plain values, for a checkpoint; a GPU is waited for."""
        return {
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "hysteresis": self.hysteresis,
            "overflows": int(self.overflows),
        }

    def loaded(self, state: Mapping[str, Any]) -> ScaleBounds:
        """Return those of a checkpoint; what it does not hold, as torch's, stays as it is here."""
        here = {**self.state(), "overflows": 0}
        return ScaleBounds(**{name: state.get(name, value) for name, value in here.items()})
