"""Gradients of `scale_loss` blocks: stashed before backward, unscaled and added up after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from apex_mp.core import tensors
from apex_mp.core.tensors import is_wrapper, local_part, match_strides, params_of, place_name
from apex_mp.grads import shards
from apex_mp.grads.found_inf import FoundInf, inverse
from apex_mp.grads.grad_slots import GradSlots


@dataclasses.dataclass(frozen=True)
class Unscaling:
    """The scale of a loss, and the inf and NaN found when its gradients are divided by it.

    Attributes:
        scale: The factor on the loss; 0-dim on a device if the host does not wait.
        found_inf: Whether scaled gradients held any.
        found_in_sums: For each optimizer, whether unscaled gradients held any, for which the scale
            is not to blame.
    """

    scale: float | Tensor
    found_in_sums: list[FoundInf]
    found_inf: FoundInf = dataclasses.field(default_factory=FoundInf)


@dataclasses.dataclass(slots=True)
class _Stashed:
    """The gradients of one slot before a block.

    Attributes:
        before: The unscaled gradient of the parameter that is stepped.
        source_grad: The gradient of the parameter that backward writes to.
        copy: A copy of `source_grad` if that is a view, whose memory backward may write.
    """

    before: Tensor | None = None
    source_grad: Tensor | None = None
    copy: Tensor | None = None


_NOTHING = _Stashed()
_Pairs: TypeAlias = tuple[list[Tensor], list[Tensor]]


def slots_of(*optimizers: Any) -> GradSlots:
    """Return the slots of optimizers; a parameter that several of them have gets one slot."""
    known: set[int] = set()
    groups: list[dict[str, Any]] = []
    model_of: dict[Any, Tensor] = {}
    for optimizer in optimizers:
        model_of.update(getattr(optimizer, "_amp_model_of", {}))
        for group in optimizer.param_groups:
            new = {id(param): param for param in group["params"] if id(param) not in known}
            known |= new.keys()
            groups.append({"params": [*new.values()]})
    return GradSlots(groups, model_of)


class LossGrads:
    """The gradients of optimizers before and after the backward of a `scale_loss` block.

    Args:
        optimizers: Any objects with param_groups.
        scaled_by: For each the scale of its gradients if they were left scaled, else None.

    Attributes:
        slots: The parameters of all optimizers.
    """

    def __init__(self, optimizers: Sequence[Any], scaled_by: Sequence[float | None]) -> None:
        self.slots = slots_of(*optimizers)
        self._optimizers = optimizers
        self._stash: dict[int, _Stashed] = {}
        self._scaled: dict[int, float] = {}
        for optimizer, scale in zip(optimizers, scaled_by, strict=True):
            if scale is not None:
                own = _ids_of(optimizer)
                rows = (row for row, param in enumerate(self.slots.params) if id(param) in own)
                self._scaled.update(dict.fromkeys(rows, scale))

    @property
    def is_scaled(self) -> bool:
        """Return whether there are gradients that were left scaled."""
        return bool(self._scaled)

    def stash(self) -> None:
        """Set unscaled gradients aside; those that were left scaled stay."""
        for row in {*self.slots.with_master, *self.slots.read().rows()}:
            source, target = self.slots.sources[row], self.slots.params[row]
            stashed = self._stash[row] = _Stashed()
            if source is not target:
                if source.grad is not None:  # Else the user has cleared those of the model.
                    stashed.before = target.grad
                target.grad = None
            if row in self._scaled:
                continue
            grad = stashed.source_grad = source.grad
            source.grad = None
            if source is target:
                stashed.before = grad
                if grad is not None and _is_strided_view(grad):
                    # DistributedDataParallel may write to this memory, a view of its bucket.
                    stashed.copy = grad.clone()

    def check_stashed(self, unscaling: Unscaling) -> None:
        """Look for inf and NaN in the stashed gradients."""
        stashed = {id(self.slots.params[row]): each.before for row, each in self._stash.items()}
        for optimizer, found in zip(self._optimizers, unscaling.found_in_sums, strict=True):
            grads = [stashed.get(param) for param in _ids_of(optimizer)]
            before = [dense_values(local_part(grad)) for grad in grads if grad is not None]
            found.check([_real(_writable(grad)) for grad in before])

    def restore(self) -> None:
        """Put the stashed gradients back in place of the present ones."""
        for row, (source, target) in enumerate(self.slots.pairs()):
            stashed = self._stash.get(row, _NOTHING)
            if row not in self._scaled:
                source.grad = stashed.source_grad
                if stashed.copy is not None and stashed.source_grad is not None:
                    with torch.no_grad():
                        stashed.source_grad.copy_(stashed.copy)
            if row not in self._scaled or source is not target:
                target.grad = stashed.before

    def forget(self, optimizer: Any) -> None:
        """Drop the stashed gradients of an optimizer."""
        own = _ids_of(optimizer)
        for row, (source, target) in enumerate(self.slots.pairs()):
            if id(target) in own and (row not in self._scaled or source is not target):
                self._stash[row] = _Stashed()

    @torch.no_grad()
    def scale_by(self, scale: float, *, only_scaled: bool) -> None:
        """Scale the present gradients, so that backward adds scaled ones to them.

        Masters' gradients stay: backward writes to the parameters of the model.
        """
        for row in self._scaled if only_scaled else range(len(self.slots.params)):
            source, target = self.slots.sources[row], self.slots.params[row]
            has_master, scaled_by = source is not target, self._scaled.get(row)
            if has_master:
                _clear_with_model(source, target)
            if source.grad is None or scaled_by == scale:
                continue
            if has_master and scaled_by is None:
                source.grad = torch.zeros_like(source.grad)
            else:
                source.grad = _writable(source.grad)
                source.grad.mul_(scale / (scaled_by or 1.0))

    @torch.no_grad()
    def unscale(self, unscaling: Unscaling) -> None:
        """Give each stepped parameter its unscaled gradient, added to the stashed one."""
        found_inf, inv_scale = unscaling.found_inf, inverse(unscaling.scale)
        fresh: _Pairs = ([], [])
        added: _Pairs = ([], [])
        summed: list[tuple[Tensor, Tensor, Tensor | None]] = []  # not added up in place
        grads = self.slots.read()
        for row in self._stash.keys() - grads.rows():
            source, target = self.slots.sources[row], self.slots.params[row]
            source.grad, before = self._stash[row].source_grad, self._stash[row].before
            target.grad = None if before is None else _writable(before)
        lists = fresh, added, summed
        for here in grads.plain.values():
            for row, grad in zip(here.rows, here.grads, strict=True):
                stashed = self._stash.get(row, _NOTHING)
                if stashed.before is not None:
                    self._assign(row, grad, *lists)
                    continue
                target, out = self.slots.params[row], grad
                if self.slots.sources[row] is not target:
                    out = target.grad = torch.empty_like(grad, dtype=target.dtype)
                fresh[0].append(grad)
                fresh[1].append(out)
        for row in grads.others:
            self._assign(row, self._writable_grad(row), *lists)
        found_inf.unscale(*fresh, inv_scale)
        found_inf.add_unscaled(*added, inv_scale)
        if summed:
            wrappers = [grad for _, grad, _ in summed if is_wrapper(grad)]
            found_inf.unscale_wrappers(wrappers, inv_scale)
        for target, grad, before in summed:
            target.grad = _sum(grad, before)
        # An unscaled gradient may be too large for float16 where the scaled one was not.
        self._check_low([*fresh[1], *added[1]], unscaling.found_in_sums)
        if grads.has_parts:
            founds = [found_inf, *unscaling.found_in_sums]
            shards.agree(self.slots.params, founds, scale=unscaling.scale)

    def _check_low(self, grads: list[Tensor], founds: list[FoundInf]) -> None:
        """Look for inf and NaN in the float16 gradients of each optimizer."""
        low = {id(grad): grad for grad in grads if grad.dtype is torch.float16}
        if not low:
            return
        for optimizer, found in zip(self._optimizers, founds, strict=True):
            own = _ids_of(optimizer)
            mine = [param.grad for param in self.slots.params if id(param) in own]
            parts = [local_part(grad) for grad in mine if grad is not None]
            found.check([part for part in parts if id(part) in low])

    def _assign(
        self,
        row: int,
        grad: Tensor,
        fresh: _Pairs,
        added: _Pairs,
        summed: list[tuple[Tensor, Tensor, Tensor | None]],
    ) -> None:
        """Give a parameter its gradient, and note in the lists what is to be computed for it."""
        source, target = self.slots.sources[row], self.slots.params[row]
        stashed = self._stash.get(row, _NOTHING)
        before = None if stashed.before is None else _writable(stashed.before)
        if stashed.copy is not None and _share_memory(grad, before):
            before = stashed.copy
        if is_wrapper(grad):
            summed.append((target, grad, before))
        elif grad.is_sparse or (before is not None and before.is_sparse):
            grad = _coalesced(grad).to(target.dtype)
            _append(fresh, dense_values(grad), dense_values(grad))
            summed.append((target, grad, before))
        elif before is not None:
            part = local_part(before)
            _append(added, match_strides(grad, part), part)
            target.grad = before
        elif source is not target:
            target.grad = torch.empty_like(grad, dtype=target.dtype)
            _append(fresh, grad, target.grad)
        else:
            _append(fresh, grad, grad)

    def _writable_grad(self, row: int) -> Tensor:
        """Return the gradient of backward; one that cannot be written to is replaced first."""
        source, target = self.slots.sources[row], self.slots.params[row]
        grad = source.grad
        assert grad is not None  # It was read.
        if grad.is_sparse or tensors.is_usual(grad):
            return grad
        resolved = _writable(grad)
        if source is not target or not is_wrapper(grad) or isinstance(grad, FakeTensor):
            reason = tensors.no_numbers(resolved)
            if reason is None and not grad.is_complex():
                reason = tensors.not_floating(resolved)
            if reason is not None:
                raise RuntimeError(f"scale_loss: grads{self._place_of(target)} {reason}")
        if resolved is not grad:
            source.grad = resolved
        return resolved

    def _place_of(self, target: Tensor) -> str:
        """Return group and index of a parameter in its optimizer, for messages."""
        places = (
            f"[{number}][{index}]"
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if param is target
        )
        return next(places)


def _ids_of(optimizer: Any) -> set[int]:
    return {*map(id, params_of(optimizer))}


def _clear_with_model(source: Tensor, target: Tensor) -> None:
    # A user who clears the gradients of the model wants those of the masters cleared too.
    if source.grad is None:
        target.grad = None


def _share_memory(grad: Tensor, before: Tensor | None) -> bool:
    if before is None or grad.is_sparse:
        return False
    return grad.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def _append(lists: _Pairs, source: Tensor, target: Tensor) -> None:
    lists[0].append(_real(source))
    lists[1].append(_real(target))


def _real(grad: Tensor) -> Tensor:
    # The operators take real numbers only.
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _writable(grad: Tensor) -> Tensor:
    """Return the gradient, or a copy if its strides or negation forbid writing to it."""
    return tensors.writable(grad) if grad.layout is torch.strided else grad


def _is_strided_view(grad: Tensor) -> bool:
    return grad._is_view() and not grad.is_sparse and not is_wrapper(grad)


def _coalesced(grad: Tensor) -> Tensor:
    return grad.coalesce() if grad.is_sparse else grad


def dense_values(grad: Tensor) -> Tensor:
    """Return a gradient, or the values of a sparse one."""
    return _coalesced(grad)._values() if grad.is_sparse else grad


def _sum(grad: Tensor, before: Tensor | None) -> Tensor:
    if before is None:
        return grad
    return grad + before if before.is_sparse else before + grad  # torch wants the dense one first


def found_in(slots: GradSlots, scale: float | Tensor) -> FoundInf:
    """Look for inf and NaN in gradients, of masters and of the model, in all processes."""
    found = FoundInf()
    both = {id(each): each for pair in slots.pairs() for each in pair}.values()
    grads = (local_part(each.grad) for each in both if each.grad is not None)
    found.check([_real(_writable(dense_values(grad))) for grad in grads if not is_wrapper(grad)])
    if slots.read().has_parts:
        shards.agree(slots.params, [found], scale=scale)
    return found


def named_grads(
    optimizers: Iterable[Any], names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of optimizers, each with a name for its parameter."""
    for optimizer in optimizers:
        models = getattr(optimizer, "_amp_model_of", {})
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = names.get(id(models.get(param, param)))
                grad = dense_values(param.grad)
                grad = grad.to_local() if hasattr(grad, "to_local") else grad  # of a DTensor
                if not is_wrapper(grad):  # The inf and NaN of others cannot be counted.
                    yield name or place_name(group, number, index), grad
