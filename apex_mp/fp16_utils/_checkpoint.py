"""The parts of an FP16_Optimizer checkpoint, read and checked before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.master import MasterGroup

_DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")


def required(state_dict: Mapping[str, Any], key: str) -> Any:
    """Return `state_dict[key]`, or raise a ValueError that says which keys there are."""
    if key not in state_dict:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict: key {key!r} is missing; the dict has {[*state_dict]}"
        )
    return state_dict[key]


def masters(groups: Sequence[MasterGroup]) -> list[list[Tensor]]:
    """Return copies of the masters, a list for each group."""
    return [[master.detach().clone() for master in group.master_params] for group in groups]


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
        scaler.load_state_dict(state_dict["loss_scaler"])
        return scaler
    values = {"cur_scale": required(state_dict, "cur_scale")}
    if dynamic:
        values["cur_iter"] = required(state_dict, "cur_iter")
        values |= {key: required(state_dict, key) for key in _DYNAMIC_KEYS}
    scaler.load_state_dict(values)
    return scaler


def read_masters(
    state_dict: Mapping[str, Any], groups: Sequence[MasterGroup]
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a master, or a group's flat vector of them, and what to write to it."""
    if "fp32_from_fp16" in state_dict:
        key = "fp32_from_fp16"
        mine: list[list[Tensor]] = [[*group.master_params] for group in groups]
        saved = [list(one) for one in state_dict[key]]
    else:
        key, mine = "fp32_groups_flat", [[group.flat] for group in groups]
        saved = [[one] for one in required(state_dict, key)]
    expected = [[tuple(tensor.shape) for tensor in one] for one in mine]
    given = [[tuple(tensor.shape) for tensor in one] for one in saved]
    if given != expected:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict: {key} has {_count(given)}, this optimizer has "
            f"{_count(expected)}; they must match"
        )
    return [
        pair
        for ours, theirs in zip(mine, saved, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]


def _count(shapes: list[list[tuple[int, ...]]]) -> str:
    return f"{len(shapes)} groups of tensors of shapes {shapes}"
