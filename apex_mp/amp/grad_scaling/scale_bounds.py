"""torch's GradScaler with bounds and hysteresis of the scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import forks, ops, tensors
from apex_mp.core.log import warn
from apex_mp.loss_scale import FLOAT32_MAX, FLOAT32_SMALLEST_NORMAL, DynamicLossScale

# Dynamo cannot trace these methods; torch's own optimizers use this decorator too.
eager = torch._disable_dynamo  # type: ignore[attr-defined]
# Below it float16 gradients have fewer digits than without a scale; the bound of FP16_Optimizer.
_LOWEST_OF_16_BIT = 1.0
_NO_CHECKS = "No inf checks were recorded prior to update."


@dataclasses.dataclass
class ScaleBounds:
    """Bounds and hysteresis of a GradScaler; without them its rule is torch's, above `lowest`.

    Attributes:
        min_scale: The scale does not back off below this; None: 1 with 16-bit gradients, else
            2**-126.
        max_scale: The scale does not grow above this; None: no bound.
        hysteresis: Overflows until the scale backs off.
        overflows: State: overflows since the scale grew, at which it stayed. A tensor on the device
            of the scale, once the scale is on one.
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
        self,
        scale: Tensor,
        good_steps: Tensor,
        found_inf: Tensor,
        lowest: float,
        factors: Mapping[str, Any],
    ) -> None:
        """Update the scale on its device, by the rule of `DynamicLossScale`.

        Args:
            scale: 0-dim float32; written.
            good_steps: 0-dim int32; written.
            found_inf: 0-dim float32, not 0 if a step was skipped.
            lowest: The scale does not back off below this.
            factors: As in `check`.
        """
        if not isinstance(self.overflows, Tensor):
            self.overflows = torch.full_like(good_steps, self.overflows)
        ops.update_scale_(
            scale,
            good_steps,
            self.overflows,
            found_inf,
            min_scale=lowest,
            max_scale=math.inf if self.max_scale is None else self.max_scale,
            hysteresis=self.hysteresis,
            **factors,
        )

    def forget_overflows(self) -> None:
        """Set the count of overflows to 0, because the scale was set; the host does not wait."""
        if isinstance(self.overflows, Tensor):
            self.overflows.zero_()
        else:
            self.overflows = 0

    def state(self) -> dict[str, Any]:
        """Return all attributes as plain values, for a checkpoint; the host waits for a GPU."""
        return {
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "hysteresis": self.hysteresis,
            "overflows": int(self.overflows),
        }

    def loaded(self, state: Mapping[str, Any]) -> ScaleBounds:
        """Return the bounds that a checkpoint holds; these if it holds none, as torch's files."""
        here = {**self.state(), "overflows": 0}
        return ScaleBounds(**{name: state.get(name, value) for name, value in here.items()})


class BoundedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler, whose scale follows the rule of `DynamicLossScale`.

    Without bounds the rule is torch's to the bit, but the scale never becomes 0. Other arguments as
    of `torch.amp.GradScaler`.

    Args:
        bounds: The bounds.
    """

    _has_16_bit_grads = False  # so far

    def __init__(
        self,
        bounds: ScaleBounds,
        *,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
    ) -> None:
        if isinstance(device, torch.nn.Module):
            raise TypeError(
                f'GradScaler: device is a {type(device).__name__}; it must be "cuda" or "cpu". A '
                "module is given as model="
            )
        is_absent: Any = torch.cuda.amp.common.amp_definitely_not_available
        if device == "cuda" and enabled and is_absent():
            # As torch's, whose own warning would name a line of this file.
            warn(
                "GradScaler is enabled, but CUDA is not available. Disabling: losses are not "
                'scaled, and no step is skipped. On the CPU use GradScaler("cpu")',
                "no-gpu-nothing-is-scaled-or-cast",
                UserWarning,
            )
            enabled = False
        if enabled and not FLOAT32_SMALLEST_NORMAL <= init_scale <= FLOAT32_MAX:
            raise ValueError(
                f"GradScaler: init_scale is {init_scale}; it must lie in "
                f"[{FLOAT32_SMALLEST_NORMAL}, {FLOAT32_MAX}]"
            )
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._bounds = bounds
        if self._enabled and bounds:
            bounds.check(init_scale, self._factors())

    def __repr__(self) -> str:
        """Return the scale and its rule; the host waits for a GPU."""
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        names = ("growth_factor", "backoff_factor", "growth_interval")
        rule = ", ".join(f"{name}={getattr(self, f'_{name}')}" for name in names)
        return f"{type(self).__name__}({self._device!r}, scale={self.get_scale()}, {rule})"

    @eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale, or set it; see `GradScaler.update`."""
        try:
            if self._enabled and new_scale is None:
                self._update_scale()
            else:
                super().update(new_scale)
                if new_scale is not None:
                    self._bounds.forget_overflows()
        except AssertionError as error:
            raise with_advice(
                error,
                _NO_CHECKS,
                " No optimizer whose parameters have gradients was given to scaler.step(optimizer) "
                "or scaler.unscale_(optimizer) since the last scaler.update(). An FP16_Optimizer "
                "scales its loss itself: it needs no GradScaler.",
            ) from None

    @property
    def _lowest(self) -> float:
        """The smallest scale that it backs off to."""
        if self._bounds.min_scale is not None:
            return self._bounds.min_scale
        lowest = _LOWEST_OF_16_BIT if self._has_16_bit_grads else FLOAT32_SMALLEST_NORMAL
        return min(lowest, math.inf if self._bounds.max_scale is None else self._bounds.max_scale)

    def _update_scale(self) -> None:
        scale, good_steps = self._check_scale_growth_tracker("update")
        found_infs = [
            tensors.copy_async(found, scale.device)
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        if not found_infs:
            raise AssertionError(_NO_CHECKS)
        found_inf = found_infs[0] if len(found_infs) == 1 else torch.stack(found_infs).sum()
        self._bounds.update(scale, good_steps, found_inf, self._lowest, self._factors())
        self._per_optimizer_states.clear()

    def _factors(self) -> dict[str, Any]:
        return {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
        }

    def get_scale(self) -> float:
        """Return the scale; the host waits for a GPU.

        Raises:
            RuntimeError: This process was forked from the one that uses the GPU.
        """
        if self._enabled and self._scale is not None:
            forks.refuse_read("GradScaler: the scale", self._scale.device)
        return float(super().get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the state: torch's five entries, and bounds if there are any.

        These are `min_scale`, `max_scale`, `hysteresis`, and `overflows`: how many there were since
        the scale last changed.
        """
        state = super().state_dict()
        return {**state, **self._bounds.state()} if state and self._bounds else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a scaler, this one or torch's; bounds stay if it has none.

        Args:
            state_dict: What `state_dict()` has returned.
        """
        super().load_state_dict(state_dict)
        self._bounds = self._bounds.loaded(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bounds": ScaleBounds(**self._bounds.state())}


def with_advice(error: AssertionError, message: str, advice: str) -> AssertionError:
    """Return an error of torch's; if it has this message, with advice added."""
    return AssertionError(message + advice) if str(error) == message else error
