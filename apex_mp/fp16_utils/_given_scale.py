"""The loss scale arguments of FP16_Optimizer: legacy arguments, a value, or a loss scaler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import (
    FLOAT32_SMALLEST_NORMAL,
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
)

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
