"""Combine what processes find in their parts of DTensors, in one collective."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from apex_mp.core import tensors
from apex_mp.grads.found_inf import FoundInf


def refuse_fsdp1(caller: str, optimizer: Any) -> None:
    """Raise a RuntimeError if an optimizer steps what FullyShardedDataParallel (FSDP1) has divided.

    Its parameters do not say how, so that processes could not agree on an overflow or a norm.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    params = tensors.params_of(optimizer) if several else []
    if any(getattr(param, "_fsdp_flattened", False) for param in params):
        raise RuntimeError(
            f"{caller}: {type(optimizer).__name__} steps parameters of a FullyShardedDataParallel "
            "(FSDP1), which do not say how they are divided, so that an overflow in one process "
            "would be unknown to the others. Use torch.distributed.fsdp.fully_shard (FSDP2), or "
            "float32 parameters and torch's ShardedGradScaler"
        )


@torch.no_grad()
def agree(
    params: Sequence[Tensor],
    founds: Sequence[FoundInf],
    *,
    sums: bool = False,
    scale: float | Tensor,
) -> None:
    """Combine what the processes that hold parts of DTensors have found, in all of them.

    A flag of inf and NaN is set if it is set in any process, and sums of squares become those of
    whole tensors. There is one collective, of a number for each parameter and flag, for each
    process group that a DTensor is sharded over; none if no parameter is sharded. The host does not
    wait. All processes must call it with the same parameters; which of these have gradients may
    differ. At the first call with some parameters the host waits, and compares them and the loss
    scale.

    Args:
        params: All parameters, in the same order in all processes.
        founds: What was found; the flags of each are combined.
        sums: Whether to combine the sums of squares of `founds[0]`, one for each parameter [False].
        scale: The loss scale, one element; 1 without one.

    Raises:
        RuntimeError: Parameters or loss scales differ between processes.
    """
    divided_over = _groups(params)
    groups = dict.fromkeys(group for groups in divided_over for group in groups)
    pairs = zip(params, divided_over, strict=True)
    first = next((param for param, over in pairs if over), params[0])
    scalar_device = first.device
    if groups and first not in _COMPARED:
        # Over all dimensions: copies of the model, too, have to be the same.
        widest = max(filter(None, map(_mesh_of, params)), key=lambda mesh: mesh.size())
        _compare(params, float(scale), widest)
        _note_parts_elsewhere(params, divided_over, widest)
        _COMPARED[first] = True
    if groups and _ELSEWHERE:
        pairs = zip(params, divided_over, strict=True)
        divided_over = [_ELSEWHERE.get(param, over) for param, over in pairs]  # type: ignore[no-untyped-call]
        groups |= dict.fromkeys(group for over in divided_over for group in over)
    numbers = torch.stack([found.on(scalar_device).double() for found in founds])
    if sums:
        own = founds[0].sums_on(scalar_device)
        numbers = torch.cat([numbers, own if len(own) else own.new_zeros(len(params))])
    for group in groups:
        if sums:
            pattern = (*(group in over for over in divided_over),)
            numbers.mul_(_shares(pattern, len(founds), group.size(), scalar_device))
        dist.all_reduce(numbers, group=group)
    for found, flag in zip(founds, numbers, strict=False):
        found.add({scalar_device: (flag != 0.0).float()})
    if sums:
        founds[0].replace_sums(scalar_device, numbers[len(founds) :])


# The first parameter of each list that is known to be the same in all processes.
_COMPARED = WeakIdKeyDictionary()
# Parameters in whose place other processes have others; over which groups these are divided.
_ELSEWHERE = WeakIdKeyDictionary()


def _compare(params: Sequence[Tensor], scale: float, mesh: Any) -> None:
    """Raise a RuntimeError, in all processes of a mesh, if loss scales or parameters differ."""
    mine = scale, (*(f"{[*param.shape]} in {param.dtype}" for param in params),)
    ranks_of = {mine: {dist.get_rank()}}
    for dim in range(mesh.ndim):  # What is known in one is passed on in the next.
        for of_rank in _gathered(ranks_of, mesh.get_group(dim)):
            for found, ranks in of_rank.items():
                ranks_of.setdefault(found, set()).update(ranks)
    if len(ranks_of) == 1:
        return
    pairs = sorted((min(ranks), found) for found, ranks in ranks_of.items())
    (rank, (scale, here)), (other, (their_scale, theirs)) = pairs[:2]
    each = enumerate(zip(here, theirs, strict=False))
    differ = next((number for number, (one, its) in each if one != its), None)
    if their_scale != scale:
        found = f"the loss scale is {scale} in rank {rank} and {their_scale} in rank {other}"
    elif differ is not None:
        pair = f"{here[differ]} in rank {rank} and {theirs[differ]} in rank {other}"
        found = f"parameter {differ} is {pair}"
    else:
        found = f"rank {rank} has {len(here)} parameters and rank {other} has {len(theirs)}"
    raise RuntimeError(
        f"{found}. Processes that hold parts of the same parameters need the same loss scale, "
        "and the same parameters in the same order"
    )


def _note_parts_elsewhere(
    params: Sequence[Tensor], divided_over: Sequence[tuple[Any, ...]], widest: Any
) -> None:
    """Note parameters in whose place other processes have other tensors.

    Outside of the mesh of a parameter there are copies of it, or other experts, whose squares count
    as those of one tensor that is divided over all. A mesh does not say which; values do.
    """
    numbers = [
        number
        for number, (param, mesh) in enumerate(zip(params, map(_mesh_of, params), strict=True))
        if param.is_floating_point() and not param.is_meta
        if mesh is None or mesh.size() < widest.size()
    ]
    # By number the sum and the norm of the whole tensor; None where processes have others.
    known: dict[int, tuple[float, float] | None] = {}
    for number in numbers:
        part = tensors.local_part(params[number].detach())
        norm = torch.linalg.vector_norm(part, dtype=torch.float64)
        known[number] = part.sum(dtype=torch.float64).item(), norm.item()
    for group in dict.fromkeys(group for number in numbers for group in divided_over[number]):
        of_ranks = _gathered(known, group)
        for number in [number for number in numbers if group in divided_over[number]]:
            parts, norms = zip(*(of_rank[number] for of_rank in of_ranks), strict=True)
            known[number] = sum(parts), math.hypot(*norms)
    over = (*(widest.get_group(dim) for dim in range(widest.ndim) if widest.size(dim) > 1),)
    for group in over if numbers else ():
        of_ranks = _gathered(known, group)
        for number in numbers:
            if len({of_rank[number] for of_rank in of_ranks}) > 1:
                known[number] = None
    for number in numbers:
        if known[number] is None:
            _ELSEWHERE[params[number]] = over


def _mesh_of(param: Tensor) -> Any:
    spec = getattr(param, "_spec", None) if tensors.is_wrapper(param) else None
    return None if spec is None else spec.mesh


def _gathered(value: Any, group: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, value, group)
    return of_ranks


def _groups(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return for each parameter the process groups that it is sharded over."""
    # For this call only: a mesh compares equal to one whose process group was destroyed.
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


# Cached: to copy a new tensor to a GPU the host would wait.
@functools.lru_cache(maxsize=64)
def mask(numbers: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Return `count` bools: True at these numbers."""
    found = torch.zeros(count, dtype=torch.bool)
    found[[*numbers]] = True
    return found.to(device)


@functools.lru_cache(maxsize=64)
def _shares(is_divided: tuple[bool, ...], flags: int, size: int, device: torch.device) -> Tensor:
    """Return weights for a sum over processes: 1 for sharded tensors, 1 / `size` for the others."""
    shares = [1.0] * flags + [1.0 if divided else 1.0 / size for divided in is_divided]
    return torch.tensor(shares, dtype=torch.float64, device=device)
