"""`offload=True`: masters and moments in host memory, steps on the CPU, weights on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from apex_mp.core import transfers
from apex_mp.core.tensors import is_wrapper
from apex_mp.optimizers._state import StateLayout


def check_option(who: str, value: Any) -> None:
    """Raise a TypeError unless `offload` is True, False or "gradients"."""
    if not (isinstance(value, bool) or value == "gradients"):
        raise TypeError(f"{who}: offload is {value!r}; it must be True, False or 'gradients'")


def check_params(who: str, number: int, params: Iterable[Any], names: Sequence[str] | None) -> None:
    """Refuse parameters of a group that cannot be offloaded; frozen ones may be anywhere.

    Args:
        who: The optimizer's name, for messages.
        number: The number of the group.
        params: Its parameters.
        names: Of the parameters, empty where there is none [None: none].

    Raises:
        TypeError: One is a DTensor.
        ValueError: One is not on a GPU.
    """
    for index, param in enumerate(params):
        if not (isinstance(param, Tensor) and param.requires_grad):
            continue  # If it is no tensor, torch says so.
        named = f" ({names[index]})" if names and names[index] else ""
        where = f"{who}: params[{number}][{index}]{named}"
        if is_wrapper(param):
            raise TypeError(
                f"{where} is a {type(param).__name__}, and offload is set; it must be False. "
                "FSDP2's CPUOffloadPolicy takes parameters, gradients and states of sharded models "
                "to the host"
            )
        if not transfers.is_offloadable(param.device):
            raise ValueError(
                f"{where} is on {param.device}, and offload is set; it must be on a GPU. Move the "
                "model there before, or leave offload out"
            )


def check_memory(
    who: str,
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[Any, Any],
    layout_of: Callable[[Mapping[str, Any]], StateLayout],
) -> None:
    """Raise a MemoryError if the states that parameters do not have yet need more than there is.

    Args:
        who: The optimizer's name, for messages.
        groups: The parameter groups.
        states: The states of parameters.
        layout_of: Returns the layout of a group's states.
    """
    needed = sum(
        layout_of(group).bytes_of(param, group)
        for group in groups
        for param in group["params"]
        if isinstance(param, Tensor) and param.requires_grad and not is_lazy(param)
        if param not in states
    )
    available = transfers.available_bytes()
    if available is not None and needed > available:
        raise MemoryError(
            f"{who}: with offload masters and moments take {needed:,} bytes of host memory, and "
            f"{available:,} are available; split masters and narrower moments take less"
        )
