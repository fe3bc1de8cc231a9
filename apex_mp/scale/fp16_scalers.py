"""The loss scale of FP16_Optimizer: apex's loss scalers, arguments that stand for them, devices."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp.core import forks, readback
from apex_mp.core.state_checks import as_dict
from apex_mp.loss_scale import (
    FLOAT32_SMALLEST_NORMAL,
    FP16_UTILS_PRESET,
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
)
from apex_mp.scale.device_scale import DeviceScale

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


_WHO = "FP16_Optimizer"
_ARGUMENTS = [*inspect.signature(DynamicLossScaler).parameters]
_RULE = ("scale_factor", "scale_window", "min_loss_scale", "max_loss_scale", "hysteresis")


def new_scaler(
    static: Any, dynamic: Any, dynamic_args: Any, defaults: Mapping[str, Any]
) -> tuple[LossScaler | DynamicLossScaler, dict[str, Any]]:
    """Return the loss scaler that the arguments of a constructor ask for.

    Args:
        static: `static_loss_scale`.
        dynamic: `dynamic_loss_scale`.
        dynamic_args: `dynamic_loss_args`.
        defaults: Arguments of a DynamicLossScaler that `dynamic_args` may override.

    Returns:
        The scaler, and the arguments for a dynamic one that may be needed later.

    Raises:
        TypeError, ValueError: An argument is no loss scale, or two ask for different scales.
    """
    arguments = {**defaults, **_checked(dynamic_args)}
    for name, given, others in (
        ("dynamic_loss_scale", dynamic, scaler_of(static)),
        ("static_loss_scale", static, dynamic),
    ):
        scaler = scaler_of(given)
        if scaler is not None:
            if others or dynamic_args:
                raise ValueError(
                    f"{_WHO}: {name} is {given!r}, and another argument asks for a loss scale too; "
                    "give it once"
                )
            rule = vars(scaler) if isinstance(scaler, DynamicLossScaler) else {}
            return scaler, {**arguments, **{key: rule[key] for key in _RULE if key in rule}}
    if is_true("dynamic_loss_scale", dynamic):
        return DynamicLossScaler(**arguments), arguments
    _check_static(static)
    return LossScaler(static), arguments


def scaler_of(given: Any) -> LossScaler | DynamicLossScaler | None:
    """Return the loss scaler for a loss scale of any kind, or None if `given` is not one.

    A scaler of this package is returned as it is; from amp's scaler its present value is taken.

    Raises:
        ValueError: It is a value that a DynamicLossScaler cannot follow.
    """
    if isinstance(given, (LossScaler, DynamicLossScaler)):
        return given
    value = getattr(given, "value", given)  # amp's scaler, which this package must not import
    if isinstance(value, (NoOpLossScale, StaticLossScale)):
        return LossScaler(value.scale)
    return _following(value) if isinstance(value, DynamicLossScale) else None


def _following(value: DynamicLossScale) -> DynamicLossScaler:
    if value.backoff_factor != 1.0 / value.growth_factor:
        raise ValueError(
            f"{_WHO}: backoff_factor is {value.backoff_factor} and growth_factor "
            f"{value.growth_factor}; the one must be the inverse of the other, as "
            "DynamicLossScaler has one scale_factor for both"
        )
    scaler = DynamicLossScaler(
        scale_factor=value.growth_factor,
        scale_window=value.growth_interval,
        min_loss_scale=None if value.min_scale == FLOAT32_SMALLEST_NORMAL else value.min_scale,
        max_loss_scale=None if value.max_scale == math.inf else value.max_scale,
        hysteresis=value.hysteresis,
    )
    scaler.load_state_dict(
        {
            "cur_scale": value.scale,
            "cur_iter": value.good_steps,
            "last_overflow_iter": -1,
            "overflows": value.overflows,
        }
    )
    return scaler


def is_true(name: str, value: Any) -> bool:
    """Return a flag as a bool: it may be a bool of Python or numpy, 1, 0 or None.

    Raises:
        TypeError: It is anything else; Python would count a string as True.
    """
    if getattr(value, "shape", ()) == () and value in (None, False, True):
        return bool(value)
    raise TypeError(
        f"{_WHO}: {name} is {value!r}; it must be True, False or a loss scale such as "
        "apex_mp.loss_scale.DynamicLossScale(2.0**16). A scale that stays is static_loss_scale"
    )


def _checked(dynamic_args: Any) -> Mapping[str, Any]:
    if dynamic_args is None:
        return {}
    if not isinstance(dynamic_args, Mapping) or not {*dynamic_args} <= {*_ARGUMENTS}:
        raise TypeError(
            f"{_WHO}: dynamic_loss_args is {dynamic_args!r}; it must be a dict with some of the "
            f"keys {_ARGUMENTS}"
        )
    return dynamic_args


def _check_static(scale: Any) -> None:
    if isinstance(scale, str):
        raise TypeError(
            f"{_WHO}: static_loss_scale is {scale!r}; it must be a number; for a scale "
            "that adjusts itself give dynamic_loss_scale=True"
        )
    if scale == 0:
        raise ValueError(
            f"{_WHO}: static_loss_scale is {scale}; it must be more than 0. Where 0 stands for a "
            "dynamic scale, as in the scripts for BERT, pass dynamic_loss_scale=True"
        )


class ScaleOnDevice:
    """The loss scale on the device, which steps update there."""

    def __init__(self) -> None:
        self._scale: DeviceScale | None = None
        self._scaler: DynamicLossScaler | None = None  # whose scale that is
        self._synced: dict[str, Any] = {}  # its attributes as they agree with the device
        # Two tensors: gradients scaled by one may have to be rescaled to the other.
        self._copies: list[Tensor] = []
        self._is_stale = True
        self._is_captured = False  # a step, by a graph

    def scale(self, scaler: LossScaler | DynamicLossScaler, device: torch.device) -> float | Tensor:
        """Return the factor on the next loss: a number if it never changes, else 0-dim float32.

        The tensor keeps its value as long as gradients are scaled by it, and is the same object
        until the scale may have changed. A captured graph reads one tensor only: after a capture
        it is always that one, and `last_scale` holds its value before.
        """
        if not isinstance(scaler, DynamicLossScaler):
            return scaler.cur_scale
        live = self._live(scaler, device).scale
        if self._is_captured or readback.is_capturing():
            self._copies[1].copy_(self._copies[0])
            self._copies[0].copy_(live)
        elif self._is_stale:
            self._copies.reverse()
            self._copies[0].copy_(live)
        self._is_stale = False
        return self._copies[0]

    @property
    def last_scale(self) -> Tensor | None:
        """The value of the tensor of `scale` before it was written; None without a capture."""
        return self._copies[1] if self._copies and self._is_captured else None

    def for_step(
        self, scaler: LossScaler | DynamicLossScaler, device: torch.device
    ) -> DeviceScale | None:
        """Return the scale for a step that updates it; None if it never changes."""
        if not isinstance(scaler, DynamicLossScaler):
            return None
        self._is_stale = True
        return self._live(scaler, device)

    def _live(self, scaler: DynamicLossScaler, device: torch.device) -> DeviceScale:
        """Return the scale on the device, updated if the user has written to the scaler."""
        scale = self._scale
        if scale is not None and scale.device == device and self._agrees(scaler):
            return scale
        if readback.is_capturing():
            raise RuntimeError(
                "FP16_Optimizer: the loss scale was set, or never used, before this capture of a "
                "CUDA graph. Take one step outside of the capture first"
            )
        readback.wait()
        if scale is None or scale.device != device:
            scale = self._scale = DeviceScale(scaler.loss_scale_value, device)
            self._copies = [scale.scale.clone(), scale.scale.clone()]
        else:
            scale.assign(scaler.loss_scale_value)
        self._scaler, self._synced, self._is_stale = scaler, dict(vars(scaler)), True
        return scale

    def _agrees(self, scaler: LossScaler | DynamicLossScaler) -> bool:
        return scaler is self._scaler and vars(scaler) == self._synced

    def update(self, scaler: LossScaler | DynamicLossScaler, *, skipped: bool) -> None:
        """Update the scaler for a step that has updated the scale on the device.

        Values that the user wrote to the scaler after that step hold for the steps that follow.
        """
        if scaler is not self._scaler:
            scaler.update_scale(skipped)
            return
        written = {
            name: value for name, value in vars(scaler).items() if self._synced.get(name) != value
        }
        vars(scaler).update(self._synced)
        scaler.update_scale(skipped)
        self._synced = dict(vars(scaler))
        vars(scaler).update(written)

    def write_through(self, scaler: LossScaler | DynamicLossScaler) -> None:
        """Make replays of a captured graph use the values that were written to the scaler."""
        if self._is_captured and self._scale is not None and scaler is self._scaler:
            self._live(self._scaler, self._scale.device)

    def catch_up(self, scaler: LossScaler | DynamicLossScaler) -> None:
        """Update the scaler; the host waits.

        Raises:
            RuntimeError: This process was forked from the one that uses the GPU.
        """
        if self._scale is not None:
            forks.refuse_read("FP16_Optimizer: the loss scale", self._scale.device)
        readback.wait()
        if not self._is_captured or self._scale is None or not self._agrees(scaler):
            return
        value = self._scale.read()
        if isinstance(value, DynamicLossScale) and isinstance(scaler, DynamicLossScaler):
            scaler.cur_scale, scaler.overflows = value.scale, value.overflows
            scaler.last_overflow_iter = scaler.cur_iter - 1 - value.good_steps
            self._synced = dict(vars(scaler))

    def note_captured(self) -> None:
        """Note that a graph takes a step whenever it likes, and reads the scale where it is now."""
        self._is_captured = True
