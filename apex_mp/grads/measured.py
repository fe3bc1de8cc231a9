"""The gradients of one optimizer: measured, or unscaled in place."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from apex_mp.grads import shards
from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.grad_slots import Grads, GradSlots
from apex_mp.grads.in_host_memory import is_mark


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one pass over gradients found, in all processes that hold parts of them.

    It keeps no gradient alive.

    Attributes:
        slots: The parameters.
        rows: Numbers of the parameters whose gradients here were measured.
        found: What the pass found. Sums of squares, if measured, are those of the gradients after
            the pass, one for each parameter.
        unscaled: Whether the pass has unscaled the gradients.
    """

    slots: GradSlots
    rows: list[int]
    found: FoundInf
    unscaled: bool

    @classmethod
    def of(
        cls, grads: Grads, found: FoundInf, scale: float | Tensor, *, unscaled: bool, sums: bool
    ) -> Measured:
        """Return what all processes have found in gradients; call it right after the pass."""
        if grads.has_parts:
            shards.agree(grads.slots.params, [found], sums=sums, scale=scale)
        rows = [row for here in grads.plain.values() for row in here.rows]
        return cls(grads.slots, rows, found, unscaled)

    def params(self) -> list[Tensor]:
        """Return the parameters whose gradients here were measured."""
        return [self.slots.params[row] for row in self.rows]

    def norm(self, device: torch.device) -> Tensor:
        """Return the l2 norm of all gradients after the pass: 0-dim float64 on a device."""
        return self.found.sums_on(device).sum().sqrt()


def measure(grads: Grads, scale: float | Tensor) -> Measured:
    """Test gradients for inf and NaN; sum the squares of plain ones. The host does not wait."""
    found = FoundInf()
    for device, here in grads.plain.items():
        found.check_each(device, here, len(grads.slots.params))
    _unscale_others(found, grads, 1.0)
    return Measured.of(grads, found, scale, unscaled=False, sums=True)


@torch.no_grad()
def unscale(grads: Grads, inv_scale: Tensor, scale: Tensor, *, sums: bool) -> Measured:
    """Multiply gradients in place by `inv_scale`; the host does not wait."""
    found = FoundInf()
    _unscale_others(found, grads, inv_scale)
    count = len(grads.slots.params) if sums else None
    for device, here in grads.plain.items():
        # Parameters may share a gradient, which is to be unscaled once.
        first: dict[int, tuple[int, Tensor]] = {}
        each = zip(here.rows, here.grads, strict=True)
        pairs = [(first.setdefault(id(grad), (row, grad)), row) for row, grad in each]
        distinct = [grad for _, grad in first.values()]
        rows = [row for row, _ in first.values()] if sums else []
        found.unscale(distinct, distinct, inv_scale, rows, count)
        for (source, _), row in pairs if sums else ():
            if source != row:
                found.sum_sq[device][row] = found.sum_sq[device][source]
    return Measured.of(grads, found, scale, unscaled=True, sums=sums)


@torch.no_grad()
def _unscale_others(found: FoundInf, grads: Grads, inv_scale: float | Tensor) -> None:
    """Multiply gradients that `GradSlots` lists as others by `inv_scale`, and check them."""
    # By id; parameters may share a gradient, which is to be unscaled once.
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for param in grads.other_params():
        grad = param.grad
        assert grad is not None  # It was read.
        if is_mark(grad):
            continue
        _, changed = known.setdefault(id(grad), (grad, _resolved(grad)))
        if changed is not grad:
            param.grad = changed
    found.unscale_others([grad for _, grad in known.values()], inv_scale)


def _resolved(grad: Tensor) -> Tensor:
    """Return a gradient in a form that can be checked and clipped in place; often it is its own."""
    if grad.is_sparse:
        # The sum of an index's values may overflow in float16.
        return grad.coalesce() if grad.dtype == torch.float16 else grad
    # torch.nn.utils.clip_grad_norm_ refuses lazy conjugates.
    return grad.resolve_conj().resolve_neg() if grad.layout is torch.strided else grad
