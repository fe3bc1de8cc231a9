"""The scaled gradients of one optimizer: measured, or unscaled in place."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core.device_scale import bring
from apex_mp.core.found_inf import FoundInf
from apex_mp.core.grad_slots import Grads, GradSlots


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one pass over plain gradients found.

    Attributes:
        grads: The gradients that were read.
        found: What it found; if sums of squares were asked for, of each gradient as the pass has
            left it, in the order of `grads`.
        unscaled: Whether the pass has unscaled them.
        marks: The gradients as the pass has left them.
    """

    grads: Grads
    found: FoundInf
    unscaled: bool
    marks: _C.GradMarks

    def is_of(self, slots: GradSlots) -> bool:
        """Whether the gradients there are those that were read, unchanged."""
        now = slots.read()
        same = not now.others and [*map(id, now.params())] == [*map(id, self.grads.params())]
        return same and not self.marks.differ(slots.params)

    def norm(self, device: torch.device) -> Tensor:
        """Return the l2 norm of all gradients, as they lie: 0-dim float64 on a device."""
        sums = [bring(each.sum(), device) for each in self.found.sum_sq.values()]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(sums).sum().sqrt()

    def norms(self) -> list[Tensor]:
        """Return the l2 norm of each group's gradients, as they lie: 0-dim float64, one device."""
        norms = []
        for device, sums in self.found.sum_sq.items():
            rows, _ = self.grads.plain[device]
            roots = torch.split(sums.sqrt(), self.grads.slots.counts(rows))
            norms.append(torch.stack(torch._foreach_norm(roots)))
        home = norms[0].device
        together = torch.stack([bring(each, home) for each in norms])
        return [*torch.linalg.vector_norm(together, dim=0).unbind()]


def measure(grads: Grads) -> Measured:
    """Test the plain gradients for inf and NaN and sum their squares; the host does not wait."""
    found = FoundInf()
    for device, (_, on_device) in grads.plain.items():
        found.check_on(device, on_device, range(len(on_device)), len(on_device))
    return Measured(grads, found, False, _marks_of(grads))


@torch.no_grad()
def unscale(grads: Grads, inv_scale: Tensor, found: FoundInf, *, sums: bool) -> Measured:
    """Multiply the plain gradients in place by `inv_scale`; the host does not wait.

    Args:
        grads: The gradients.
        inv_scale: One float32 element on any device.
        found: What was found in other gradients; added to.
        sums: Measure sums of squares in the same pass.

    Returns:
        What was found, with `found`.
    """
    for device, (_, on_device) in grads.plain.items():
        # Parameters may share a gradient, which is to be unscaled once.
        distinct = {id(grad): grad for grad in on_device}
        found.unscale_on(device, [*distinct.values()], inv_scale, sums=sums)
        if sums and len(distinct) < len(on_device):
            of_grad = dict(zip(distinct, found.sum_sq[device].unbind(), strict=True))
            found.sum_sq[device] = torch.stack([of_grad[id(grad)] for grad in on_device])
    return Measured(grads, found, True, _marks_of(grads))


def _marks_of(grads: Grads) -> _C.GradMarks:
    marks = _C.GradMarks()
    marks.take(grads.slots.params)
    return marks
