"""Read an FP16_Optimizer checkpoint of any era, and check it before anything is written."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core.state_checks import check_optimizer_state, part_advice
from apex_mp.core.tensors import no_numbers
from apex_mp.loss_scale import from_grad_scaler, is_of_grad_scaler
from apex_mp.masters.masters import MasterGroup
from apex_mp.saved import inner_state
from apex_mp.scale.fp16_scalers import DynamicLossScaler, LossScaler, scaler_of

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
    """Return the loss scaler that a checkpoint describes."""
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


_WHO = "FP16_Optimizer"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The checked content of a checkpoint for an FP16_Optimizer.

    Attributes:
        loss_scaler: The new loss scaler.
        iteration: Steps until now.
        overflow: Whether the last step was skipped.
        first_closure_call_this_step: The old flag of that name.
        inner: The inner optimizer's state_dict.
        masters: Pairs of a tensor to write to, a master or a group's flat vector of them, and its
            new values.
    """

    loss_scaler: LossScaler | DynamicLossScaler
    iteration: int
    overflow: bool
    first_closure_call_this_step: bool
    inner: Mapping[str, Any]
    masters: list[tuple[Tensor, Tensor]]


def masters(groups: Sequence[MasterGroup]) -> list[list[Tensor]]:
    """Return copies of the masters, a list for each group."""
    return [[master.detach().clone() for master in group.master_params] for group in groups]


def joined(
    inner: dict[str, Any],
    masters: list[list[Any]],
    scale: Mapping[str, Any],
    param_groups: list[dict[str, Any]],
    model_of: Mapping[Parameter, Parameter],
) -> dict[str, Any]:
    """Return a state_dict of the parts that a CheckpointView has loaded."""
    if not scale:
        return inner
    pairs = zip(masters, param_groups, strict=False)  # `read` says if their numbers differ.
    present = [
        [each for each, param in zip(saved, group["params"], strict=False) if param in model_of]
        for saved, group in pairs
    ]
    return {**scale, "optimizer_state_dict": inner, "fp32_from_fp16": present}


def read(
    state_dict: Mapping[str, Any],
    optimizer: Any,
    groups: Sequence[MasterGroup],
    loss_scaler: LossScaler | DynamicLossScaler,
    *,
    iteration: int,
    dynamic_args: Mapping[str, Any],
) -> Loaded:
    """Return the checked content of a checkpoint; nothing is changed."""
    plain = "param_groups" in state_dict and "optimizer_state_dict" not in state_dict
    loaded = Loaded(
        loss_scaler=loss_scaler
        if plain
        else read_loss_scaler(state_dict, loss_scaler, dynamic_args),
        masters=_followed(groups) if plain else _read_masters(state_dict, groups),
        iteration=_read_iteration(state_dict, iteration),
        inner=state_dict if plain else _read_inner_state(state_dict, optimizer, groups),
        overflow=bool(state_dict.get("overflow", False)),
        first_closure_call_this_step=bool(state_dict.get("first_closure_call_this_step", True)),
    )
    inner_state.check(_WHO, loaded.inner, optimizer)
    return loaded


def _followed(groups: Sequence[MasterGroup]) -> list[tuple[Tensor, Tensor]]:
    """Return masters that agree with the model, for a checkpoint that has none.

    A master that rounds to its model parameter is kept; any other is older than the model, whose
    value replaces it.
    """
    return [
        (master, torch.where(master.to(model.dtype) == model, master, model.float()).detach())
        for group in groups
        for master, model in zip(group.master_params, group.model_params, strict=True)
    ]


def _read_iteration(state_dict: Mapping[str, Any], present: int) -> int:
    """Return the number of steps until now; checkpoints of 2019 lack it with a static scale."""
    iteration = state_dict.get("cur_iter", present)
    try:
        return operator.index(iteration)
    except TypeError:
        raise TypeError(
            f"{_WHO}.load_state_dict: cur_iter is {iteration!r}; it must be an int"
        ) from None


def _read_masters(
    state_dict: Mapping[str, Any], groups: Sequence[MasterGroup]
) -> list[tuple[Tensor, Tensor]]:
    if "fp32_from_fp16" in state_dict:
        key = "fp32_from_fp16"
        mine: list[list[Tensor]] = [[*group.master_params] for group in groups]
        saved = [list(one) for one in state_dict[key]]
    else:
        key, mine = "fp32_groups_flat", [[group.flat] for group in groups]
        saved = [[one] for one in required(state_dict, key)]
    if len(saved) != len(mine):
        raise ValueError(
            f"{_WHO}.load_state_dict: {key} has {len(saved)} groups, this optimizer has "
            f"{len(mine)}; they must match"
        )
    for number, (ours, theirs) in enumerate(zip(mine, saved, strict=True)):
        if len(ours) != len(theirs):
            raise ValueError(
                f"{_WHO}.load_state_dict: {key}[{number}] has {len(theirs)} masters, group "
                f"{number} of this optimizer has {len(ours)}; they must match"
            )
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            name = f"{key}[{number}]" + f"[{index}]" * (key == "fp32_from_fp16")
            _check_master(name, their, our)
    return [
        pair
        for ours, theirs in zip(mine, saved, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]


def _check_master(name: str, saved: Any, master: Tensor) -> None:
    """Raise an error if copying to a master would fail, or change the saved values."""
    if not torch.is_tensor(saved):
        kind = type(saved).__name__
    elif no_numbers(saved) is not None or not saved.is_floating_point():
        kind = f"tensor of {saved.dtype}, {saved.layout}, on {saved.device}"
    elif saved.shape != master.shape:
        raise ValueError(
            f"{_WHO}.load_state_dict: {name} has shape {[*saved.shape]}, this optimizer's has "
            f"{[*master.shape]}; they must match"
        )
    else:
        return
    raise TypeError(
        f"{_WHO}.load_state_dict: {name} is a {kind}; it must be a dense floating tensor"
    )


def _read_inner_state(
    state_dict: Mapping[str, Any], optimizer: Any, groups: Sequence[MasterGroup]
) -> Mapping[str, Any]:
    """Return the inner optimizer's state, an entry for each parameter.

    The fused FP16_Optimizer of 2019 had one flat master a group, which was the inner optimizer's
    only parameter; its state is cut into that of the masters.
    """
    inner: Mapping[str, Any] = required(state_dict, "optimizer_state_dict")
    if inner_state.has_load_hooks(optimizer):
        if not isinstance(inner, Mapping) or "param_groups" not in inner:
            return inner  # They may make a state of it.
    else:
        check_optimizer_state(_WHO, inner)
    saved_groups = inner["param_groups"]
    flat = "fp32_groups_flat" in state_dict and len(saved_groups) == len(groups)
    if not flat or any(len(group["params"]) != 1 for group in saved_groups):
        return _in_order(inner, optimizer, groups)
    state: dict[int, Any] = {}
    param_groups = []
    for saved, group in zip(saved_groups, groups, strict=True):
        first = len(state)
        whole = inner["state"].get(saved["params"][0], {})
        state.update(enumerate(_cut(whole, group.master_params), first))
        param_groups.append({**saved, "params": [*range(first, len(state))]})
    return {"state": state, "param_groups": param_groups}


def _in_order(
    inner: Mapping[str, Any], optimizer: Any, groups: Sequence[MasterGroup]
) -> Mapping[str, Any]:
    """Put groups that fit only in the order of early 2018 into the order of the parameters.

    Until July 2018 the masters came first in each group, then the parameters of float32.
    """
    if len(inner["param_groups"]) != len(groups):
        return inner
    param_groups = []
    for saved, ours, group in zip(
        inner["param_groups"], optimizer.param_groups, groups, strict=True
    ):
        old_order = [*group.master_params, *group.fp32_params]
        early = {**ours, "params": old_order}
        same_count = len(saved["params"]) == len(old_order) == len(ours["params"])
        if (
            not same_count
            or inner_state.fits(optimizer, inner["state"], saved, ours)
            or not inner_state.fits(optimizer, inner["state"], saved, early)
        ):
            param_groups.append(saved)
            continue
        keys = {id(param): key for param, key in zip(old_order, saved["params"], strict=True)}
        param_groups.append({**saved, "params": [keys[id(param)] for param in ours["params"]]})
    return {**inner, "param_groups": param_groups}


def _cut(whole: Mapping[str, Any], masters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the state of each master, cut out of that of the flat vector that held them."""
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
