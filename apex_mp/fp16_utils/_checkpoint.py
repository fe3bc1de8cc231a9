"""The parts of an FP16_Optimizer checkpoint, read and checked before anything is written."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
        saved = state_dict["loss_scaler"]
        if isinstance(saved, (LossScaler, DynamicLossScaler)):
            return copy.copy(saved)  # Checkpoints of 2019 hold the object itself.
        scaler.load_state_dict(saved)
        return scaler
    values = {"cur_scale": required(state_dict, "cur_scale")}
    if dynamic:
        values["cur_iter"] = required(state_dict, "cur_iter")
        values |= {key: required(state_dict, key) for key in _DYNAMIC_KEYS}
        # What newer versions added.
        values |= {key: state_dict[key] for key in scaler.state_dict() if key in state_dict}
    scaler.load_state_dict(values)
    return scaler


def read_iteration(state_dict: Mapping[str, Any], present: int) -> int:
    """Return the number of steps until now; checkpoints of 2019 lack it with a static scale."""
    iteration = state_dict.get("cur_iter", present)
    try:
        return operator.index(iteration)
    except TypeError:
        raise TypeError(
            f"FP16_Optimizer.load_state_dict: cur_iter is {iteration!r}; it must be an int"
        ) from None


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
    for number, one in enumerate(saved):
        for index, tensor in enumerate(one):
            _check_master(f"{key}[{number}]" + f"[{index}]" * (key == "fp32_from_fp16"), tensor)
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


def read_inner_state(
    state_dict: Mapping[str, Any], groups: Sequence[MasterGroup]
) -> Mapping[str, Any]:
    """Return the inner optimizer's state, for each parameter.

    The fused FP16_Optimizer of 2019 had one flat master a group, the only parameter that the inner
    optimizer knew; its state is cut into the masters' here.
    """
    inner: Mapping[str, Any] = required(state_dict, "optimizer_state_dict")
    saved_groups = inner["param_groups"]
    flat = "fp32_groups_flat" in state_dict and len(saved_groups) == len(groups)
    if not flat or any(len(group["params"]) != 1 for group in saved_groups):
        return inner
    state: dict[int, Any] = {}
    param_groups = []
    for saved, group in zip(saved_groups, groups, strict=True):
        first = len(state)
        whole = inner["state"].get(saved["params"][0], {})
        state.update(enumerate(_cut(whole, group.master_params), first))
        param_groups.append({**saved, "params": [*range(first, len(state))]})
    return {"state": state, "param_groups": param_groups}


def _check_master(name: str, saved: Any) -> None:
    """Raise a TypeError if copying it to a master would fail, or lose what it says."""
    if not torch.is_tensor(saved):
        kind = type(saved).__name__
    elif saved.layout is not torch.strided or saved.is_meta or not saved.is_floating_point():
        kind = f"tensor of {saved.dtype}, {saved.layout}, on {saved.device}"
    else:
        return
    raise TypeError(
        f"FP16_Optimizer.load_state_dict: {name} is a {kind}; it must be a dense floating tensor"
    )


def _cut(whole: Mapping[str, Any], masters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """State of a flat vector as that of the masters which lie in it one after the other."""
    sizes = [master.numel() for master in masters]
    parts: list[dict[str, Any]] = [{} for _ in masters]
    for key, value in whole.items():
        if not (torch.is_tensor(value) and value.dim() == 1 and value.numel() == sum(sizes)):
            for part in parts:
                part[key] = value
            continue
        for part, piece, master in zip(parts, torch.split(value, sizes), masters, strict=True):
            part[key] = torch.empty_like(master, dtype=piece.dtype, requires_grad=False)
            part[key].as_strided((piece.numel(),), (1,)).copy_(piece)
    return parts


def _count(shapes: list[list[tuple[int, ...]]]) -> str:
    return f"{len(shapes)} groups of tensors of shapes {shapes}"
