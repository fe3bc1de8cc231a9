"""The loss scale in an FP16_Optimizer checkpoint, in whichever form an era wrote it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import (
    FLOAT32_SMALLEST_NORMAL,
    DynamicLossScale,
    StaticLossScale,
    from_grad_scaler,
    is_of_grad_scaler,
)

_DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")


def required(state_dict: Mapping[str, Any], key: str) -> Any:
    """Return `state_dict[key]`, or raise a ValueError that says which keys there are."""
    if key not in state_dict:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict: key {key!r} is missing; the dict has {[*state_dict]}"
        )
    return state_dict[key]


def read_loss_scaler(
    state_dict: Mapping[str, Any],
    present: LossScaler | DynamicLossScaler,
    defaults: Mapping[str, Any],
) -> LossScaler | DynamicLossScaler:
    """Return the loss scaler that a checkpoint describes.

    Args:
        state_dict: With `loss_scaler` (fp16_utils), or `cur_scale` and its kin (optimizers).
        present: The scaler in use; what the checkpoint does not say is taken from it.
        defaults: Arguments of a DynamicLossScaler, should there have to be a new one.
    """
    dynamic = bool(required(state_dict, "dynamic_loss_scale"))
    if isinstance(present, DynamicLossScaler) == dynamic:
        scaler = copy.copy(present)
    else:
        scaler = DynamicLossScaler(**defaults) if dynamic else LossScaler()
    if "loss_scaler" in state_dict:
        saved = state_dict["loss_scaler"]
        whole = whole_scaler(saved)
        if whole is None:
            scaler.load_state_dict(saved)
        return whole or scaler
    values = {"cur_scale": required(state_dict, "cur_scale")}
    if dynamic:
        values["cur_iter"] = required(state_dict, "cur_iter")
        values |= {key: required(state_dict, key) for key in _DYNAMIC_KEYS}
        # What newer versions added.
        values |= {key: state_dict[key] for key in scaler.state_dict() if key in state_dict}
    scaler.load_state_dict(values)
    return scaler


def whole_scaler(saved: Any) -> LossScaler | DynamicLossScaler | None:
    """Return a scaler for what says all that one needs, or None.

    That is a scaler object, of this module or of amp, which checkpoints of 2019 hold, and the
    state of a GradScaler.
    """
    if isinstance(saved, (LossScaler, DynamicLossScaler)):
        return copy.copy(saved)
    if is_of_grad_scaler(saved):
        return _with_value(from_grad_scaler(saved))
    value = getattr(saved, "value", None)  # amp's scaler, of a room above this one
    return _with_value(value) if isinstance(value, (StaticLossScale, DynamicLossScale)) else None


def _with_value(value: StaticLossScale | DynamicLossScale) -> LossScaler | DynamicLossScaler:
    if isinstance(value, StaticLossScale):
        return LossScaler(value.scale)
    if value.backoff_factor != 1.0 / value.growth_factor:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict: backoff_factor is {value.backoff_factor} and "
            f"growth_factor {value.growth_factor}; the one must be the inverse of the other, as "
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
