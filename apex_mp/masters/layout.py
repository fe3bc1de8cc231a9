"""The state that a fused optimizer keeps for each parameter: how it is made and loaded."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.tensors import match_strides
from apex_mp.masters import codes
from apex_mp.masters.joined import like
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.masters.store import MASTER, master_dtype


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor that Optimizer.load_state_dict does not cast.

    It would cast a plain tensor to the parameter's dtype, and so spoil moments in float16.
    """

    tensor: Tensor


def unpack(
    states: Mapping[Any, dict[str, Any]],
) -> collections.defaultdict[Any, dict[str, Any]]:
    """Return the states with the tensors that were packed."""
    plain: collections.defaultdict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for param, state in states.items():
        plain[param] = {
            key: value.tensor if isinstance(value, Kept) else value for key, value in state.items()
        }
    return plain


def check_own(caller: str, optimizer: Any, param: Tensor) -> None:
    """Raise a ValueError unless a tensor is a parameter of an optimizer."""
    if not any(param is own for group in optimizer.param_groups for own in group["params"]):
        raise ValueError(
            f"{caller}: the tensor of shape {[*param.shape]} is no parameter of this optimizer; "
            "give one of param_groups"
        )


def moment_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which the options of a group keep a parameter's state tensors."""
    if param.dtype == torch.float64:
        return torch.float64
    dtype: torch.dtype = group.get("moment_dtype", torch.float32)
    is_small = dtype == codes.CODES and param.numel() < codes.LEAST_CODED
    return torch.float32 if is_small else dtype


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The names of an optimizer's entries in `state[param]`.

    Attributes:
        kind: The optimizer with an article, for messages: "an Adam".
        tensors: Tensors like the parameter: float32, for float64 parameters float64.
        numbers: 0-dim float32 tensors on the parameter's device.
        unsaved_numbers: Likewise, but the optimizer makes and removes them; no checkpoint has them.
    """

    kind: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    unsaved_numbers: tuple[str, ...] = ()

    def bytes_of(self, param: Tensor, group: Mapping[str, Any]) -> int:
        """Return the bytes of a parameter's state, beside its numbers."""
        kept = [moment_dtype(param, group)] * len(self.tensors)
        master = master_dtype(param, group)
        kept += [] if master is None else [master]
        blocks = -(-param.numel() // codes.BLOCK) * kept.count(codes.CODES)
        return blocks + param.numel() * sum(dtype.itemsize for dtype in kept)

    def completed(
        self,
        state: Mapping[str, Any],
        param: Tensor,
        group: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """Return a complete state by a group's options, in the parameter's memory order.

        An entry that is not a tensor counts as missing, except a plain number among `numbers`.
        """
        whole = codes.widened(state, self.tensors)
        for name in self.numbers:
            if not torch.is_tensor(whole.get(name)):
                whole[name] = _new_number(param, whole.get(name), device)
        dtype = moment_dtype(param, group)
        for which, name in enumerate(self.tensors):
            if dtype == codes.CODES:
                moment = whole.get(name) if torch.is_tensor(whole.get(name)) else None
                whole.update(codes.encoded(name, which, moment, param, device))
            elif torch.is_tensor(whole.get(name)):
                whole[name] = match_strides(whole[name], param).to(device, dtype)
            else:
                whole[name] = like(param, dtype, device)
        return whole

    def moved(self, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """Return a state of torch's optimizer with its numbers where a step wants them."""
        numbers = {name: state[name] for name in self.numbers if torch.is_tensor(state.get(name))}
        moved = {name: each.to(param.device, torch.float32) for name, each in numbers.items()}
        return {**state, **moved}

    def loaded(
        self,
        where: str,
        state: Mapping[str, Any],
        param: Tensor,
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """Return a parameter's saved state in the layout used here.

        Tensors are copied, so that two optimizers never share one, and are `Kept` until `unpack`.
        """
        names = (*self.numbers, *self.tensors)
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"{where} has {[*state]} and lacks {missing}; it must be the state of {self.kind} "
                "optimizer"
            )
        whole = codes.widened(state, self.tensors)
        wide = torch.promote_types(param.dtype, torch.float32)
        for name in self.tensors:
            _check_like(f"{where}['{name}']", whole[name], param)
            whole[name] = Kept(like(param, wide, device).copy_(whole[name]))
        for name in self.numbers:
            number = _number(f"{where}['{name}']", name, whole[name])
            whole[name] = Kept(_new_number(param, number, device))
        return whole


@dataclasses.dataclass(frozen=True)
class Rule:
    """The arithmetic of an optimizer, and its state.

    Attributes:
        name: `kName` of one of csrc/math/rules.h.
        layout: The state.
        clips_by_global_norm: Whether groups are always clipped by the norm of all.
        steps_parts: Whether each element is stepped by itself, so that parts of tensors can be.
    """

    name: str
    layout: StateLayout
    clips_by_global_norm: bool = False
    steps_parts: bool = True

    def layout_of(self, group: Mapping[str, Any]) -> StateLayout:
        """Return the layout of the states of a group."""
        return self.layout

    def note_new(self, state: dict[str, Any], before: Any, group: Mapping[str, Any]) -> None:
        """Called with a state that was completed, and what it was before, or None."""

    def after_step(
        self,
        states: dict[Any, dict[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        without_grad: Sequence[tuple[int, int]],
    ) -> None:
        """Called after a step if the host knows that it was not skipped."""

    def tidy(self, states: dict[Any, dict[str, Any]]) -> None:
        """Remove what only steps need, before others see the states; the host may wait."""


def loaded_master(
    where: str, value: Any, param: Tensor, device: torch.device | None = None
) -> Tensor | None:
    """Return a copy of a saved master: float32, or an int16 remainder.

    One in 16 bits is left out: torch, which loaded it, has cast it like its parameter. So is {},
    which torch.distributed.checkpoint has for what is not in a file.
    """
    if getattr(value, "dtype", None) in LOW_PRECISION or (isinstance(value, dict) and not value):
        return None
    is_remainder = getattr(value, "dtype", None) == torch.int16
    _check_like(f"{where}['{MASTER}']", value, param, is_remainder)
    if param.dtype not in LOW_PRECISION:
        return None
    return like(param, torch.int16 if is_remainder else torch.float32, device).copy_(value)


def _new_number(param: Tensor, value: Any, device: torch.device | None) -> Tensor:
    number = float(value) if isinstance(value, (int, float)) else 0.0
    return torch.full((), number, dtype=torch.float32, device=device or param.device)


def _check_like(name: str, value: Any, param: Tensor, is_remainder: bool = False) -> None:
    """Refuse what cannot be copied into a tensor like the parameter."""
    if is_remainder and param.dtype not in LOW_PRECISION:
        raise TypeError(
            f"{name} is the remainder of a split master, of type {value.dtype}, and the parameter "
            f"is {param.dtype}; save with state_dict(), which has float32 masters"
        )
    if not (torch.is_tensor(value) and (value.is_floating_point() or is_remainder)):
        kind = value.dtype if torch.is_tensor(value) else type(value).__name__
        raise TypeError(f"{name} is of type {kind}; it must be a floating tensor")
    is_divided = tensors.is_wrapper(param)
    if is_divided and not tensors.is_wrapper(value):
        raise TypeError(
            f"{name} is a plain tensor, its parameter a {type(param).__name__}; load it by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    reason = tensors.no_numbers(tensors.local_part(value) if is_divided else value)
    if reason is not None:
        raise TypeError(f"{name} {reason}")
    if value.shape != param.shape:
        raise ValueError(
            f"{name} has shape {[*value.shape]}, its parameter {[*param.shape]}; they must match"
        )


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements.
        number = math.nan
    if not 0.0 <= number < math.inf:
        wish = "a number of steps" if name == "step" else "a finite number, 0 or more"
        raise ValueError(f"{where} is {value!r}; it must be {wish}")
    return number
