"""The gradients that masters step with: scaled in the model, unscaled for whoever looks.

Gradients of low-precision parameters stay in the model, scaled, where several backward calls add
up. A master's own `.grad` is made from them on demand. A parameter that is its own master (fp32)
has only one `.grad`: it is unscaled after backward, and scaled again before the next one adds to
it. The scale may be a tensor on a device, that the host knows nothing of.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp import grads as _grads
from apex_mp._step_request import Lists
from apex_mp.device_scale import bring
from apex_mp.master import MasterGroup, rekey_state, store_grad, stored_grad, write
from apex_mp.parallel import followers

Scale: TypeAlias = float | Tensor


class Stage(enum.Enum):
    """What the `.grad` of parameters that are their own masters holds.

    After a step nobody can tell an edit of such a gradient from scaled ones added to it; it is
    taken for the latter.
    """

    READY = "nothing of ours, so what is there came in scaled"
    SCALED = "scaled gradients: backward came last"
    UNSCALED = "unscaled gradients: unscale() came last"
    STEPPED = "unscaled gradients that a step has used, or others that came in since, scaled"


class MasterGrads:
    """The masters of an optimizer's parameter groups, and the gradients they step with.

    Args:
        lazy: Masters' gradients are made when somebody looks at them, else by `unscale`.
        current_scale: Returns the loss scale that gradients have which came in without
            `begin_backward`: a number or a 0-dim tensor.

    Attributes:
        groups: The masters of each parameter group.
        model_of: The model parameter of each master.
        stage: See Stage.
        holding: Whether masters hold gradients of their own, unscaled; the model's are then not
            used.
    """

    def __init__(self, *, lazy: bool, current_scale: Callable[[], Scale]) -> None:
        self.groups: list[MasterGroup] = []
        self.model_of: dict[Parameter, Parameter] = {}
        self.stage = Stage.READY
        self.holding = False
        self._lazy = lazy
        self._current_scale = current_scale
        self._scale: Scale | None = None  # of the gradients in the model, once we know
        self._model_marks, self._own_marks = _C.GradMarks(), _C.GradMarks()
        self._rescaled = False
        self._aligned: list[tuple[list[Any], list[Tensor | None]]] = []
        followers.add(self)

    # Parameters.

    def adopt(self, param_group: dict[str, Any], state: Any) -> None:
        """Put masters into a new parameter group, and move the optimizer's state to them."""
        # Masters whose grad is made on first look slow torch's own optimizers down, which always
        # look; so they are for inner optimizers that take scaled gradients.
        group = MasterGroup(self.hold if self._lazy else None)
        self._adopt_into(group, param_group, state)
        self.groups.append(group)

    def masters_of(self, params: Collection[int]) -> list[Tensor]:
        """Return the masters of parameters of the model, given by id()."""
        return [master for master, model in self.model_of.items() if id(model) in params]

    def adopt_unfrozen(self, param_groups: list[dict[str, Any]], state: Any) -> None:
        """Make masters for parameters that have come to require grad."""
        for group, param_group in zip(self.groups, param_groups, strict=True):
            if any(param.requires_grad for param in group.frozen_params):
                self._adopt_into(group, param_group, state)

    def _adopt_into(self, group: MasterGroup, param_group: dict[str, Any], state: Any) -> None:
        new = group.adopt(param_group["params"])
        rekey_state(state, new)
        self.model_of.update({master: model for model, master in new.items()})

    def model_params(self) -> list[Parameter]:
        """The model's low-precision parameters of all groups."""
        return [param for group in self.groups for param in group.model_params]

    def master_params(self) -> list[Parameter]:
        """Their masters, in the same order."""
        return [param for group in self.groups for param in group.master_params]

    def own_params(self) -> list[Parameter]:
        """The parameters of all groups that are their own masters."""
        return [param for group in self.groups for param in group.own_params]

    def copy_to_model(self, except_for: Collection[int] = ()) -> None:
        """Write masters to the model, but not to parameters whose id() is in `except_for`."""
        for group in self.groups:
            group.copy_to_model(except_for)

    def copy_to_model_of(self, indices: Iterable[tuple[int, int]]) -> None:
        """Write some masters to the model: those at group and index of what `sources` saw."""
        pairs = []
        for group, index in indices:
            params, models = self._aligned[group]
            model = models[index]
            if model is not None:
                pairs.append((model, params[index]))
        write(pairs)

    # Backward.

    def begin_backward(self, scale: Scale, last: Tensor | None = None) -> None:
        """Prepare for a backward of a loss times `scale`, whose gradients add to those there.

        Args:
            scale: A tensor that is the same object as at the last backward is the same scale.
            last: Unless this is what it held then.
        """
        own, scaled = self.own_params(), self.model_params()
        self._rescaled = not self._own_are_scaled()
        if not self._rescaled:
            scaled += own
        # The scale may have changed since the last backward.
        before = self._scale_of_grads()
        if before is self._scale is scale and last is not None:
            before = last
        _rescale(scaled, before, scale)
        if self._rescaled:
            _rescale(own, 1.0, scale)
        self._scale = scale

    def end_backward(self) -> None:
        """After a backward: the gradients are scaled."""
        self._release()
        self.stage = Stage.SCALED

    def abandon_backward(self) -> None:
        """After a backward that raised: gradients are as before, or with what it has added."""
        if self._rescaled:
            self._unscale_own()
            self.accept_edits()

    def _scale_of_grads(self) -> Scale:
        """The scale of the gradients in the model."""
        if self._scale is None or (self.stage is Stage.STEPPED and self.came_in()):
            return self._current_scale()
        return self._scale

    # Unscaling.

    def unscale(self) -> bool | None:
        """Unscale what has accumulated; edits of masters' gradients made before are lost.

        Returns:
            Whether there is inf or NaN in it; None if that is not known yet (lazy masters).
        """
        self._release()
        self._scale = self._scale_of_grads()
        found = self._own_are_scaled() and self._unscale_own()
        self.stage = Stage.UNSCALED
        if self._lazy:
            return None
        return self._make_master_grads() or found

    def hold(self) -> None:
        """Give every master its unscaled gradient, unless masters hold theirs already."""
        if not self.holding:
            self._make_master_grads()

    def accept_edits(self) -> None:
        """After a step: take the gradients as they are now for those that it used."""
        if self.stage is Stage.STEPPED:
            self._model_marks.take(self.model_params())
            self._own_marks.take(self.own_params())

    def came_in(self) -> bool:
        """Whether there are gradients that neither `unscale` nor a step has seen."""
        if self.stage is Stage.STEPPED:
            return self._model_marks.differ(self.model_params()) or self._own_came_in()
        return self.stage is Stage.SCALED or (
            self.stage is Stage.READY
            and any(param.grad is not None for param in self._visible_params())
        )

    def _own_are_scaled(self) -> bool:
        if self.stage is Stage.STEPPED:
            return self._own_came_in()
        return self.stage is not Stage.UNSCALED

    def _own_came_in(self) -> bool:
        return self._own_marks.differ(self.own_params())

    def _visible_params(self) -> list[Parameter]:
        """The parameters that a backward gives gradients to."""
        return self.model_params() + self.own_params()

    @torch.no_grad()
    def _unscale_own(self) -> bool:
        params = [param for param in self.own_params() if param.grad is not None]
        grads = [_grads.lie_as(_grad(param), param) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return self._divide_by_scale(grads, grads)

    @torch.no_grad()
    def _make_master_grads(self) -> bool:
        masters = [master for master, model in self.model_of.items() if model.grad is not None]
        scaled = [_grads.lie_as(_grad(self.model_of[master]), master) for master in masters]
        unscaled = [torch.empty_like(master, requires_grad=False) for master in masters]
        found = self._divide_by_scale(scaled, unscaled)
        for master, grad in zip(masters, unscaled, strict=True):
            store_grad(master, grad)
        self.holding = True
        return found

    def _divide_by_scale(self, scaled: list[Tensor], unscaled: list[Tensor]) -> bool:
        """Unscale; return whether there is inf or NaN, False where nobody asks (lazy masters)."""
        scale = self._scale_of_grads()
        if self._lazy or isinstance(scale, Tensor):
            _grads.unscale_unwaited(scaled, unscaled, scale)
            return False
        return _grads.unscale(scaled, unscaled, 1.0 / scale)

    def _release(self) -> None:
        if self._lazy and not self.holding:
            return  # No master has a gradient: to set one is a look.
        self.holding = False
        for master in self.model_of:
            store_grad(master, None)

    def zero(self, *, to_none: bool) -> None:
        """Clear all gradients: set them to None, or to zero where they exist."""
        self._release()
        for group in self.groups:
            for param in (*group.model_params, *group.own_params, *group.frozen_params):
                if param.grad is not None:
                    param.grad = None if to_none else param.grad.detach().zero_()
        self.stage = Stage.READY
        self._scale = None
        if not (to_none or self._lazy):
            self.hold()

    # Stepping.

    def end_step(self) -> None:
        """After a step, taken or skipped: what is there has been used."""
        if self._lazy:
            self._release()  # A look makes them again; gradients that come in must not be missed.
        self.stage = Stage.STEPPED
        self.accept_edits()

    def grad_of(self, param: Parameter) -> Tensor | None:
        """The gradient to step `param` with: its own, or while masters hold none the model's."""
        model = self.model_of.get(param)
        grad = stored_grad(param) if model is None or self.holding else model.grad
        return None if grad is None else _grads.lie_as(grad, param)

    def sources(self, param_groups: list[dict[str, Any]]) -> tuple[Lists, Lists, Scale]:
        """Return for each parameter whose gradient to step with, and its model parameter.

        Both are lists as in StepRequest, and the third is the scale of the former.
        """
        models = [self._models_of(i, group) for i, group in enumerate(param_groups)]
        if self.holding:
            return [[None] * len(one) for one in models], models, 1.0
        return models, models, self._scale_of_grads()

    def _models_of(self, index: int, param_group: dict[str, Any]) -> list[Tensor | None]:
        """The model parameter of each master in a group's list, which may change at any time."""
        params = param_group["params"]
        del self._aligned[len(self.groups) :]
        if index == len(self._aligned):
            self._aligned.append(([], []))
        seen, models = self._aligned[index]
        if not _C.same_items(params, seen):
            models = [self.model_of.get(param) for param in params]
            self._aligned[index] = [*params], models
        return models

    def collect(
        self, param_groups: list[dict[str, Any]]
    ) -> tuple[list[list[Tensor | None]], Scale]:
        """Return the gradients of each group as they lie, and the one scale that they all have."""
        lists = [[self.grad_of(param) for param in group["params"]] for group in param_groups]
        pending = not self.holding and any(
            model.grad is not None for model in self.model_of.values()
        )
        if not pending:
            return lists, 1.0
        scale = self._scale_of_grads()
        # The few fp32 parameters of a mixed model are unscaled already.
        if isinstance(scale, Tensor) or scale != 1.0:
            for grads, group in zip(lists, param_groups, strict=True):
                for index, param in enumerate(group["params"]):
                    grad = grads[index]
                    if grad is not None and param not in self.model_of:
                        here = bring(scale, grad.device) if isinstance(scale, Tensor) else scale
                        grads[index] = grad * here
        return lists, scale


@torch.no_grad()
def _rescale(params: list[Parameter], before: Scale, after: Scale) -> None:
    """Give the gradients that there are another scale."""
    if before is after:
        return
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return
    if isinstance(before, Tensor):
        before = before.double()
    if isinstance(after, Tensor):
        after = after.double()
    factor = before / after
    if isinstance(factor, Tensor) or factor != 1.0:
        _grads.unscale_unwaited(grads, grads, factor)


def _grad(param: Parameter) -> Tensor:
    grad = param.grad
    assert grad is not None  # The caller has looked.
    return grad
