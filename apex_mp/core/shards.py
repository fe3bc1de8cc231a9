"""What processes find in their parts of DTensors, added up by one collective."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.device_scale import bring
from apex_mp.core.found_inf import FoundInf


@torch.no_grad()
def agree(
    params: Sequence[Tensor],
    founds: Sequence[FoundInf],
    rows: Mapping[torch.device, Sequence[int]] | None = None,
) -> torch.device:
    """Have all processes that hold parts of DTensors know what each has found.

    Their flags of inf and NaN become that of all, and sums of squares those of whole tensors. There
    is one collective for each process group that a DTensor is divided over, of a number for each
    parameter and flag; none where no parameter is divided. The host does not wait. All processes
    must call it with the same parameters. Which of these have gradients may differ; norms do not.

    Args:
        params: All parameters, in the same order in all processes.
        founds: What was found; flags are agreed on one by one.
        rows: By device, the number of the parameter of each element of `founds[0].sum_sq` [None:
            sums are of no interest].

    Returns:
        The device where `founds[0].sum_sq` has an element for each of `params` afterwards.
    """
    divided_over = _groups(params)
    groups = dict.fromkeys(group for groups in divided_over for group in groups)
    pairs = zip(params, divided_over, strict=True)
    home = next((param.device for param, over in pairs if over), params[0].device)
    numbers = torch.stack([found.on(home).double() for found in founds])
    if rows is not None:
        sums = torch.zeros(len(params), dtype=torch.float64, device=home)
        for device, of_device in rows.items():
            sums.add_(_spread(bring(founds[0].sum_sq[device], home), (*of_device,), len(params)))
        numbers = torch.cat([numbers, sums])
    for group in groups:
        if rows is not None:
            pattern = (*(group in over for over in divided_over),)
            numbers.mul_(_shares(pattern, len(founds), group.size(), home))
        dist.all_reduce(numbers, group=group)
    for found, flag in zip(founds, numbers, strict=False):
        found.add({home: (flag != 0.0).float()})
    if rows is not None:
        founds[0].replace_sums(home, numbers[len(founds) :])
    return home


def _groups(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return for each parameter the process groups that it is divided over."""
    # Not for longer: a mesh is equal to one of a process group that was destroyed.
    known: dict[tuple[int, Any], tuple[Any, ...]] = {}
    found: list[tuple[Any, ...]] = []
    for param in params:
        spec = getattr(param, "_spec", None) if tensors.is_wrapper(param) else None
        if spec is None:
            found.append(())
            continue
        key = (id(spec.mesh), spec.placements)
        if key not in known:
            known[key] = tuple(
                spec.mesh.get_group(dim)
                for dim, placement in enumerate(spec.placements)
                if not placement.is_replicate() and spec.mesh.size(dim) > 1
            )
        found.append(known[key])
    return found


def _spread(values: Tensor, numbers: tuple[int, ...], count: int) -> Tensor:
    """Return `count` elements: the values at their numbers, 0 elsewhere."""
    if len(numbers) == count:
        return values
    return values.new_zeros(count).index_copy_(0, _index(numbers, values.device), values)


def gathered(values: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return the elements with some numbers, which are sorted; the host does not wait."""
    return values if len(numbers) == len(values) else values[_index((*numbers,), values.device)]


# The host would wait for each new tensor that it copies to a GPU.
@functools.lru_cache(maxsize=64)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _shares(is_divided: tuple[bool, ...], flags: int, size: int, device: torch.device) -> Tensor:
    """What each process adds of a number that all `size` have, where a tensor is not divided."""
    shares = [1.0] * flags + [1.0 if divided else 1.0 / size for divided in is_divided]
    return torch.tensor(shares, dtype=torch.float64, device=device)
