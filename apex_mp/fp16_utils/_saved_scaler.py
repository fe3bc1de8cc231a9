"""Read the loss scale of an FP16_Optimizer checkpoint, in the form of any era."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from apex_mp.core.checkpoints.state_checks import part_advice
from apex_mp.fp16_utils._given_scale import scaler_of
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import from_grad_scaler, is_of_grad_scaler

_DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")


def required(state_dict: Mapping[str, Any], key: str) -> Any:
    """Return `state_dict[key]`, or raise a ValueError that lists the keys."""
    if key not in state_dict:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict: key {key!r} is missing; the dict has {[*state_dict]}"
            f"{part_advice(state_dict)}"
        )
    return state_dict[key]


def read_loss_scaler(
    state_dict: Mapping[str, Any],
    present: LossScaler | DynamicLossScaler,
    defaults: Mapping[str, Any],
) -> LossScaler | DynamicLossScaler:
    """Return the loss scaler that a checkpoint describes.

    Args:
        state_dict: Has `loss_scaler` (fp16_utils), or `cur_scale` and similar keys (optimizers).
        present: The scaler in use; gives the values that the checkpoint lacks.
        defaults: Arguments of a DynamicLossScaler, in case a new one is needed.
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
    """Return a scaler for an entry that describes one in full, or None.

    Such entries are a scaler object of fp16_utils or amp, as in checkpoints of 2019, and the state
    of a GradScaler.
    """
    return copy.copy(scaler_of(from_grad_scaler(saved) if is_of_grad_scaler(saved) else saved))
