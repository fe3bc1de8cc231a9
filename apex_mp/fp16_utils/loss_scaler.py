"""The loss scalers of apex.fp16_utils: old names and attributes around `apex_mp.loss_scale`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from apex_mp.core.checkpoints.state_checks import as_dict
from apex_mp.loss_scale import (
    FLOAT32_SMALLEST_NORMAL,
    FP16_UTILS_PRESET,
    DynamicLossScale,
    StaticLossScale,
)

_Grads: TypeAlias = tuple[torch.Tensor | None, ...]


class _ScalesLoss:
    """Methods of both scalers."""

    cur_scale: float
    _required: tuple[str, ...] = ("cur_scale",)
    _optional: tuple[str, ...] = ()

    @property
    def loss_scale(self) -> float:
        """The factor on the loss."""
        return self.cur_scale

    @property
    def loss_scale_value(self) -> StaticLossScale | DynamicLossScale:
        """The loss scale as a frozen value, made from the present attributes."""
        raise NotImplementedError

    def scale_gradient(
        self,
        module: torch.nn.Module,
        grad_in: _Grads,
        grad_out: _Grads,
    ) -> _Grads:
        """Return scaled gradients; a backward hook of a module.

        Args:
            module: The module; not used.
            grad_in: Gradients of its inputs, None where there is none.
            grad_out: Gradients of its outputs; not used.
        """
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward on the scaled loss; gradients come out scaled.

        Args:
            loss: The loss, not scaled.
            retain_graph: As of `torch.Tensor.backward` [False].
        """
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values."""
        return {name: getattr(self, name) for name in self._required + self._optional}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set attributes from a state_dict, which may lack those that newer versions added.

        Args:
            state_dict: What `state_dict()` has returned.

        Raises:
            TypeError, ValueError: A key is missing or unknown, or a value is out of range; the
                scaler is then as before.
        """
        state_dict = as_dict(type(self).__name__, state_dict)
        missing = [name for name in self._required if name not in state_dict]
        unknown = [name for name in state_dict if name not in self._required + self._optional]
        if missing or unknown:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: keys {missing} are missing and "
                f"{unknown} unknown; the dict must hold {[*self._required]} and may hold "
                f"{[*self._optional]}"
            )
        candidate = copy.copy(self)
        vars(candidate).update(state_dict)
        _ = candidate.loss_scale_value  # Refuses what is out of range before anything changes.
        for name, value in state_dict.items():
            setattr(self, name, value)


class LossScaler(_ScalesLoss):
    """Scale by one number that never changes.

    Args:
        scale: Factor on the loss [1].
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = StaticLossScale(scale).scale

    @property
    def loss_scale_value(self) -> StaticLossScale:
        """The loss scale as a frozen value, made from the present attribute."""
        return StaticLossScale(self.cur_scale)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: the scale does not depend on overflows; FP16_Optimizer checks itself.

        Args:
            params: Ignored.
        """
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the scale never changes.

        Args:
            overflow: Ignored.
        """


class DynamicLossScaler(_ScalesLoss):
    """Scale by the largest factor without overflows, by the rule of `DynamicLossScale`.

    `cur_scale`, `cur_iter` (calls of update_scale) and `last_overflow_iter` are the state, as in
    2019, and may be written: the next `update_scale` starts from them. So may the arguments below.
    What differs from 2019: the scale is a float32 number and does not grow out of float32.

    Args:
        init_scale: Factor on the loss at first; no more than `max_loss_scale` is used [2**32].
        scale_factor: Growth multiplies by this, backing off divides by it; above 1 [2].
        scale_window: Calls without overflow before the scale grows [1000].
        min_loss_scale: The scale does not back off below this; None or 0 for no floor [1].
        max_loss_scale: The scale does not grow above this; None for no bound [None].
        hysteresis: Overflows until the scale backs off, and then does at each until it has grown
            [1].

    Raises:
        TypeError, ValueError: As `DynamicLossScale`.
    """

    _required = ("cur_scale", "cur_iter", "last_overflow_iter")
    _optional = (
        "scale_factor",
        "scale_window",
        "min_loss_scale",
        "max_loss_scale",
        "hysteresis",
        "overflows",
    )

    def __init__(
        self,
        init_scale: float = FP16_UTILS_PRESET.scale,
        scale_factor: float = FP16_UTILS_PRESET.growth_factor,
        scale_window: int = FP16_UTILS_PRESET.growth_interval,
        *,
        min_loss_scale: float | None = FP16_UTILS_PRESET.min_scale,
        max_loss_scale: float | None = None,
        hysteresis: int = FP16_UTILS_PRESET.hysteresis,
    ) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.hysteresis = hysteresis
        self.overflows = 0
        value = self.loss_scale_value  # Refuses what is out of range.
        self.cur_scale = min(value.scale, value.max_scale)

    @property
    def loss_scale_value(self) -> DynamicLossScale:
        """The loss scale as a frozen value, made from the present attributes."""
        for name, fits, wish in (
            ("scale_factor", self.scale_factor > 1, "above 1"),
            ("scale_window", self.scale_window >= 1, "at least 1"),
        ):
            if not fits:
                value = getattr(self, name)
                raise ValueError(f"{type(self).__name__}: {name} is {value!r}; it must be {wish}")
        since_overflow = self.cur_iter - self.last_overflow_iter - 1
        return DynamicLossScale(
            self.cur_scale,
            growth_factor=self.scale_factor,
            backoff_factor=1.0 / self.scale_factor,
            growth_interval=self.scale_window,
            min_scale=self.min_loss_scale or FLOAT32_SMALLEST_NORMAL,
            max_scale=math.inf if self.max_loss_scale is None else self.max_loss_scale,
            hysteresis=self.hysteresis,
            # The remainder, because each growth restarts the count and is recorded nowhere else.
            good_steps=since_overflow % self.scale_window,
            overflows=self.overflows,
        )

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step, which was skipped if it overflowed.

        Args:
            overflow: Whether a gradient of the step held inf or NaN.
        """
        value = self.loss_scale_value.update(overflow)
        self.cur_scale = value.scale
        self.overflows = value.overflows
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a gradient of `params` holds inf or NaN.

        Args:
            params: Tensors on any device and of any dtype; those without a gradient are ignored.
        """
        finite: dict[torch.device, list[torch.Tensor]] = {}
        for param in params:
            if param.grad is not None:
                finite.setdefault(param.grad.device, []).append(_all_finite(param.grad))
        # One synchronisation a device, not one a parameter.
        return not all(bool(torch.stack(flags).all()) for flags in finite.values())

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> bool:
        return not bool(_all_finite(x))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # A checkpoint of 2019 holds the pickled object without the attributes added since.
        DynamicLossScaler.__init__(self)
        vars(self).update(state)


def _all_finite(x: torch.Tensor) -> torch.Tensor:
    values = x.detach().coalesce().values() if x.is_sparse else x.detach()
    return torch.isfinite(values).all()
