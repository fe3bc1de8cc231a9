"""The gradients that masters step with: scaled in the model, unscaled in the masters.

Gradients of low-precision parameters stay in the model, scaled, where several backward calls add
up. A master's own `.grad` is made from them on demand. A parameter that is its own master (fp32)
has only one `.grad`: it is unscaled after backward, and scaled again before the next one adds to
it. The scale may be a tensor on a device, whose value the host does not know.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.core import readback
from apex_mp.core.tensors import Lists, copy_async
from apex_mp.grads.edits import Edits, EditWatch
from apex_mp.grads.found_inf import FoundInf, inverse, norms
from apex_mp.grads.grad_slots import GradSlots
from apex_mp.masters import parallel_masters
from apex_mp.masters.masters import GroupedMasters, existing_grad, store_grad, stored_grad

Scale: TypeAlias = float | Tensor


class Stage(enum.Enum):
    """What the `.grad` of parameters that are their own masters holds.

    After a step an edit of such a gradient counts as a scaled gradient that was added to it: the
    two cannot be distinguished.
    """

    READY = "no tracked gradients: existing ones are scaled"
    SCALED = "scaled gradients: backward came last"
    UNSCALED = "unscaled gradients: unscale() came last"
    STEPPED = "unscaled gradients that a step has used, or later ones, which are scaled"


class MasterGrads:
    """The masters of an optimizer's parameter groups, and the gradients they step with.

    Args:
        lazy: Masters' gradients are materialized when they are read, else by `unscale`.
        dense: Parameters must be dense, because the optimizer itself writes the model's.
        current_scale: Returns the loss scale, a number or a 0-dim tensor, of gradients that were
            added without `begin_backward`.

    Attributes:
        masters: The masters.
        stage: See Stage.
        is_in_graph: Whether a replay of a CUDA graph unscales gradients without a call.
        holding: Whether masters hold unscaled gradients of their own, which a step then uses.
    """

    def __init__(self, *, lazy: bool, dense: bool, current_scale: Callable[[], Scale]) -> None:
        # Masters that materialize `.grad` slow down torch's own optimizers, which always read it:
        # they are for inner optimizers that take scaled gradients.
        self.masters = GroupedMasters(self.materialize if lazy else None, dense=dense)
        self.stage = Stage.READY
        self.holding = False
        self._lazy = lazy
        self._current_scale = current_scale
        self._scale: Scale | None = None  # of the gradients in the model, once we know
        self._model_versions, self._fp32_versions = _C.GradVersions(), _C.GradVersions()
        self._edits = EditWatch()
        self._rescaled = self._sources_are_rescaled = False
        self.is_in_graph = False
        self._slots = GradSlots([])
        parallel_masters.add(self.masters)

    # Backward.

    def begin_backward(self, scale: Scale, last: Tensor | None = None) -> None:
        """Prepare for a backward of a loss times `scale`, which adds to existing gradients.

        A tensor that is the same object as at the last backward is the same scale, unless it was
        written since: `last` is what it held then.
        """
        own, scaled = self.masters.fp32_params(), self.masters.model_params()
        self._rescaled = not self._own_are_scaled()
        if not self._rescaled:
            scaled += own
        # The scale may have changed since the last backward.
        before = self.scale_of_grads()
        if before is self._scale is scale and last is not None:
            before = last
        self._sources_are_rescaled = (
            self.holding and before is not scale and self.model_edits() is Edits.NONE
        )
        _rescale(self.masters, scaled, before, scale)
        if self._rescaled:
            _rescale(self.masters, own, 1.0, scale)
        self._scale = scale

    def end_backward(self) -> None:
        """Note the end of a backward: the gradients are scaled."""
        self._release()
        self.stage = Stage.SCALED

    def abandon_backward(self) -> None:
        """Note a backward that raised; it may have added to some gradients."""
        if self._rescaled:
            self._unscale_own()
            self.accept_edits()
        if self._sources_are_rescaled:
            self._edits.begin(self.masters.model_params(), self._norms())

    def scale_of_grads(self) -> Scale:
        """Return the scale of the gradients in the model."""
        if self._scale is None or (self.stage is Stage.STEPPED and self.has_new_grads()):
            return self._current_scale()
        return self._scale

    # Unscaling.

    def unscale(self) -> bool | None:
        """Unscale the accumulated gradients; earlier edits of masters' gradients are lost.

        Returns:
            Whether there is inf or NaN in it; None if that is not known yet (lazy masters).
        """
        self._release()
        self.is_in_graph = self.is_in_graph or readback.is_capturing()
        self._scale = self.scale_of_grads()
        found = self._own_are_scaled() and self._unscale_own()
        self.stage = Stage.UNSCALED
        if self._lazy:
            return None
        return self._make_master_grads() or found

    def materialize(self) -> None:
        """Give every master its unscaled gradient, unless masters hold theirs already."""
        if not self.holding:
            self._make_master_grads()

    def accept_edits(self) -> None:
        """Count the gradients as they are now as those that the last step used."""
        if self.stage is Stage.STEPPED:
            self._model_versions.record(self.masters.model_params())
            self._fp32_versions.record(self.masters.fp32_params())

    def has_new_grads(self) -> bool:
        """Return whether there are gradients that neither `unscale` nor a step has read."""
        if self.stage is Stage.STEPPED:
            return self._model_versions.changed(
                self.masters.model_params()
            ) or self._fp32_versions.changed(self.masters.fp32_params())
        return self.stage is Stage.SCALED or (
            self.stage is Stage.READY
            and any(param.grad is not None for param in self.masters.visible_params())
        )

    def any_nonzero(self) -> bool:
        """Return whether new gradients are more than the zeros that `zero_grad` may leave."""
        return self.has_new_grads() and any(
            param.grad is not None and bool(param.grad.any())
            for param in self.masters.visible_params()
        )

    def model_edits(self) -> Edits:
        """Return which gradients were edited after masters' were made from the model's."""
        if self.stage is not Stage.UNSCALED or not self.holding:
            return Edits.NONE  # Else a step reads the gradients of the model themselves.
        return self._edits.find(
            self.masters.model_params(), self._norms(), self.masters.master_params()
        )

    def _norms(self) -> dict[int, float] | None:
        """Return norms of the model's gradients by id(), which the host waits for.

        None in a capture, where it cannot wait.
        """
        given = [param for param in self.masters.model_params() if param.grad is not None]
        return self._norms_of(
            given, (self.masters.plain(existing_grad(param), param) for param in given)
        )

    def _norms_of(
        self, params: list[Parameter], grads: Iterable[Tensor]
    ) -> dict[int, float] | None:
        if readback.is_capturing():
            return None
        return dict(zip(map(id, params), norms(grads), strict=True))

    def model_norm(self) -> float:
        """Return the l2 norm of the model's gradients, scaled as they are; the host waits."""
        grads = [
            self.masters.plain(existing_grad(p), p)
            for p in self.masters.model_params()
            if p.grad is not None
        ]
        return math.hypot(*norms(grads))

    def _own_are_scaled(self) -> bool:
        if self.stage is Stage.STEPPED:
            return self._fp32_versions.changed(self.masters.fp32_params())
        return self.stage is not Stage.UNSCALED

    @torch.no_grad()
    def _unscale_own(self) -> bool:
        grads = self.masters.plain_grads(self.masters.fp32_params())
        return self._divide_by_scale(grads, grads)

    @torch.no_grad()
    def _make_master_grads(self) -> bool:
        pairs = [pair for pair in self.masters.model_of.items() if pair[1].grad is not None]
        masters, models = [master for master, _ in pairs], [model for _, model in pairs]
        scaled = [self.masters.plain(existing_grad(model), master) for master, model in pairs]
        unscaled = [torch.empty_like(master, requires_grad=False) for master in masters]
        found = self._divide_by_scale(scaled, unscaled)
        for master, grad in zip(masters, unscaled, strict=True):
            store_grad(master, grad)
        self.holding = True
        self._edits.begin(
            self.masters.model_params(),
            self._norms_of(models, scaled),
            self.masters.master_params(),
        )
        return found

    def _divide_by_scale(self, scaled: list[Tensor], unscaled: list[Tensor]) -> bool:
        """Unscale; return whether there is inf or NaN, or False where the host does not wait."""
        scale = self.scale_of_grads()
        found_inf = FoundInf()
        found_inf.unscale(scaled, unscaled, inverse(scale))
        return not (self._lazy or isinstance(scale, Tensor)) and bool(found_inf)

    def _release(self) -> None:
        if self._lazy and not self.holding:
            return  # No master has a gradient; assigning `.grad` would materialize it.
        self.holding = False
        for master in self.masters.model_of:
            store_grad(master, None)

    def zero(self, *, to_none: bool) -> None:
        """Clear all gradients: set them to None, or to zero where they exist."""
        self._release()
        for group in self.masters.groups:
            for param in (*group.model_params, *group.fp32_params, *group.frozen_params):
                if param.grad is not None:
                    param.grad = None if to_none else param.grad.detach().zero_()
        self.stage = Stage.READY
        self._scale = None
        if not (to_none or self._lazy):
            self.materialize()

    # Stepping.

    def end_step(self) -> None:
        """Note the end of a step, taken or skipped: present gradients count as used."""
        if self._lazy:
            self._release()  # Else gradients of a later backward would not be used.
        self.stage = Stage.STEPPED
        self.accept_edits()

    def grad_of(self, param: Parameter) -> Tensor | None:
        """Return the gradient to step `param` with: its own, or the model's unless `holding`."""
        model = self.masters.model_of.get(param)
        grad = stored_grad(param) if model is None or self.holding else model.grad
        return None if grad is None else self.masters.plain(grad, param)

    def sources(self, param_groups: list[dict[str, Any]]) -> tuple[Lists, Lists, Scale]:
        """Return `grads_of` and `copies` of a ScaledStep, and the scale of the gradients."""
        models = self.slots(param_groups).models
        if self.holding:
            return [[None] * len(one) for one in models], models, 1.0
        return models, models, self.scale_of_grads()

    def slots(self, param_groups: list[dict[str, Any]]) -> GradSlots:
        """Return where gradients come from; found again if the lists of parameters have changed."""
        if not self._slots.fits(param_groups):
            self._slots = GradSlots(param_groups, self.masters.model_of)
        return self._slots

    def collect(
        self, param_groups: list[dict[str, Any]]
    ) -> tuple[list[list[Tensor | None]], Scale]:
        """Return the gradients of each group, and the one scale that all of them have."""
        lists = [[self.grad_of(param) for param in group["params"]] for group in param_groups]
        pending = not self.holding and any(
            model.grad is not None for model in self.masters.model_of.values()
        )
        if not pending:
            return lists, 1.0
        scale = self.scale_of_grads()
        # The few fp32 parameters of a mixed model are unscaled already.
        if isinstance(scale, Tensor) or scale != 1.0:
            for grads, group in zip(lists, param_groups, strict=True):
                for index, param in enumerate(group["params"]):
                    grad = grads[index]
                    if grad is not None and param not in self.masters.model_of:
                        here = (
                            copy_async(scale, grad.device) if isinstance(scale, Tensor) else scale
                        )
                        grads[index] = grad * here
        return lists, scale


@torch.no_grad()
def _rescale(masters: GroupedMasters, params: list[Parameter], before: Scale, after: Scale) -> None:
    """Multiply the existing gradients so that they are scaled by `after`, not `before`."""
    if before is after:
        return
    if not (isinstance(before, Tensor) or isinstance(after, Tensor)) and before == after:
        return
    grads = masters.plain_grads(params)
    if not grads:
        return
    if isinstance(before, Tensor):
        before = before.double()
    if isinstance(after, Tensor):
        after = after.double()
    FoundInf().unscale(grads, grads, inverse(before / after))
