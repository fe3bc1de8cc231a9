"""The scaled gradients of one optimizer: collected by device, measured, unscaled in place."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.core.device_scale import bring
from apex_mp.core.found_inf import FoundInf
from apex_mp.core.step import Groups


@dataclasses.dataclass(frozen=True)
class ScaledGrads:
    """The parameters of an optimizer that have a gradient, in the order of its groups.

    Attributes:
        plain: By device, those whose gradient the operators of this package read.
        others: Those whose gradient is sparse, a DTensor, or on a device without kernels: torch's
            operator unscales them.
    """

    plain: dict[torch.device, list[Tensor]]
    others: list[Tensor]

    def params(self) -> list[Tensor]:
        """Return the parameters with a plain gradient, device by device."""
        return [param for params in self.plain.values() for param in params]


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

    grads: ScaledGrads
    found: FoundInf
    unscaled: bool
    marks: _C.GradMarks

    def is_of(self, params: list[Tensor]) -> bool:
        """Whether the gradients of these parameters are those that were read, unchanged."""
        now = collect([{"params": params}])
        same = not now.others and [*map(id, now.params())] == [*map(id, self.grads.params())]
        return same and not self.marks.differ(params)

    def norm(self, device: torch.device) -> Tensor:
        """Return the l2 norm of all gradients, as they lie: 0-dim float64 on a device."""
        sums = [bring(each.sum(), device) for each in self.found.sum_sq.values()]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(sums).sum().sqrt()

    def norms(self, groups: Groups) -> list[Tensor]:
        """Return the l2 norm of each group's gradients, as they lie: 0-dim float64 on one device.

        Args:
            groups: Those that the gradients were collected from.
        """
        norms = []
        for device, sums in self.found.sum_sq.items():
            on_device = [collect([group]).plain.get(device, []) for group in groups]
            roots = torch.split(sums.sqrt(), [len(params) for params in on_device])
            norms.append(torch.stack(torch._foreach_norm(roots)))
        home = norms[0].device
        together = torch.stack([bring(each, home) for each in norms])
        return [*torch.linalg.vector_norm(together, dim=0).unbind()]


def collect(groups: Groups) -> ScaledGrads:
    """Return the parameters of an optimizer's groups that have a gradient."""
    plain: dict[torch.device, list[Tensor]] = {}
    others: list[Tensor] = []
    for group in groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            params = plain.get(grad.device)  # if there is one, the device has kernels
            if params is not None and tensors.is_usual(grad):
                params.append(param)
            elif _has_kernels(grad.device) and _is_plain(grad):
                plain.setdefault(grad.device, []).append(param)
            else:
                others.append(param)
    return ScaledGrads(plain, others)


def measure(grads: ScaledGrads) -> Measured:
    """Test the plain gradients for inf and NaN and sum their squares; the host does not wait."""
    found = FoundInf()
    for device, params in grads.plain.items():
        found.check_on(device, [*map(_grad_of, params)], range(len(params)), len(params))
    return Measured(grads, found, False, _marks_of(grads))


@torch.no_grad()
def unscale(grads: ScaledGrads, inv_scale: Tensor, found: FoundInf, *, sums: bool) -> Measured:
    """Multiply the plain gradients in place by `inv_scale`; the host does not wait.

    Args:
        grads: The gradients.
        inv_scale: One float32 element on any device.
        found: What was found in other gradients; added to.
        sums: Measure sums of squares in the same pass.

    Returns:
        What was found, with `found`.
    """
    for device, params in grads.plain.items():
        # Parameters may share a gradient, which is to be unscaled once.
        distinct = {id(grad): grad for grad in map(_grad_of, params)}
        found.unscale_on(device, [*distinct.values()], inv_scale, sums=sums)
        if sums and len(distinct) < len(params):
            of_grad = dict(zip(distinct, found.sum_sq[device].unbind(), strict=True))
            found.sum_sq[device] = torch.stack([of_grad[id(param.grad)] for param in params])
    return Measured(grads, found, True, _marks_of(grads))


def _marks_of(grads: ScaledGrads) -> _C.GradMarks:
    marks = _C.GradMarks()
    marks.take(grads.params())
    return marks


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and _C.with_cuda)


def _is_plain(grad: Tensor) -> bool:
    return tensors.not_readable(grad) is None and tensors.is_dense(grad)


def _grad_of(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None  # `collect` has seen it.
    return grad
