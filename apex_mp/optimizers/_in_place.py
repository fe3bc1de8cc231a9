"""Optimizers of torch that step by a fused one, with float32 masters, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.checkpoints.state_checks import as_dict
from apex_mp.core.masters.class_with import class_with, own_class
from apex_mp.core.masters.masters import LOW_PRECISION
from apex_mp.core.masters.store import MasterStore
from apex_mp.core.step.scaled_step import GradCheck, ScaledStep
from apex_mp.optimizers._fused import Before, FusedOptimizer
from apex_mp.optimizers._state import unpack
from apex_mp.optimizers.fused_adam import FusedAdam
from apex_mp.optimizers.fused_sgd import FusedSGD
from apex_mp.optimizers.master_weights import give_masters

_Group: TypeAlias = Mapping[str, Any]


class _InPlace(FusedOptimizer):
    """A fused optimizer that was made as one of torch's, whose options and checkpoints it keeps.

    `fuse` makes it, of a subclass of this class and of torch's.
    """

    # Options of torch's that the fused step lacks.
    _lacks: tuple[str, ...]
    # Options of the fused step that torch's lacks.
    _added: ClassVar[Mapping[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an optimizer of torch's class: `type(optimizer)(params)` has no masters."""
        added = (*cls._added, "adam_w_mode", "master_weights")  # They are among the defaults.
        kept = {name: value for name, value in options.items() if name not in added}
        return own_class(cls)(*args, **kept)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Do nothing: `__new__` has made the optimizer."""

    def _added_options(self, group: _Group) -> Mapping[str, Any]:
        """Return the options of the fused step that compute what torch's group asks for."""
        return self._added

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a fused step; by torch's class, with masters, from one on that lacks an option."""
        kind: type = type(self)  # Schedulers keep this function for an object that was unfused.
        if issubclass(kind, _InPlace) and self._can_step():
            return _hooked_step(self, *args, **kwargs)
        if issubclass(kind, _InPlace):
            self._unfuse()
        return type(self).step(self, *args, **kwargs)

    step.takes_scaled_step = True  # type: ignore[attr-defined]
    step.hooked = True  # type: ignore[attr-defined]

    def check_gradients(self, step: ScaledStep) -> GradCheck:
        """Check and measure gradients as `FusedOptimizer` does, or as `MasterWeights`."""
        if self._can_step():
            return super().check_gradients(step)
        self._unfuse()
        return self.check_gradients(step)

    def _can_step(self) -> bool:
        """Return whether the fused step has the options and gradients that the next step takes.

        A script may change them at any time to what only torch's class has.
        """
        self._refresh()
        return self._takes(self.param_groups)

    def _unfuse(self) -> None:
        """Step by torch's class from now on, with `MasterWeights`."""
        self._leave()
        give_masters(self)

    def _leave(self) -> None:
        own = own_class(type(self))
        for group in (self.defaults, *self.param_groups):
            for name in (*self._added_options(group), "master_weights"):
                group.pop(name, None)
        vars(self).pop("_plan", None)
        self.__class__ = own

    def _refresh(self) -> None:
        """Make groups ask for what a script has written into them, and for masters."""
        for group in self.param_groups:
            group.setdefault("master_weights", True)
            group.update(self._added_options(group))

    def _takes(self, groups: Iterable[_Group]) -> bool:
        try:
            for group in groups:
                self._check_options(group)
        except (RuntimeError, TypeError, ValueError):
            return False
        return not any(group.get(name) for group in groups for name in self._lacks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's class does."""
        super(FusedOptimizer, self).add_param_group(param_group)
        if not _are_steppable(self.param_groups[-1]["params"]):
            self._unfuse()

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Return state and options, those of torch's class as a script has written them."""
        self._refresh()
        return super().state_dict(compact=compact)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what torch's class has saved, without the fused step if that lacks an option."""
        groups = as_dict(self._public_name, state_dict).get("param_groups", ())
        if self._takes([{**self.defaults, **group} for group in groups]):
            super().load_state_dict(state_dict)
        else:
            self._unfuse()
            self.load_state_dict(state_dict)

    def _read(self, plan: Any, step: ScaledStep, before: Before) -> None:
        self._refresh()
        super()._read(plan, step, before)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as torch's class does."""
        kind = type(self)
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *items = reduced
        own = own_class(kind)
        return _remake, (make, tuple(own if each is kind else each for each in args)), *items


# With the hooks of the optimizer.
_hooked_step = torch.optim.Optimizer.profile_hook_step(FusedOptimizer.step)


class _Adam(_InPlace, FusedAdam):
    _lacks = ("amsgrad", "differentiable")
    _added: ClassVar = {"bias_correction": True, "eps_inside_sqrt": False, "max_grad_norm": 0.0}

    def _added_options(self, group: _Group) -> Mapping[str, Any]:
        # torch before 2.7 has no such option.
        is_adamw = own_class(type(self)) is torch.optim.AdamW
        return {**self._added, "adam_w_mode": group.get("decoupled_weight_decay", is_adamw)}

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        own = {**group}
        super()._adapt_group(number, group, states)
        if "decoupled_weight_decay" in own:
            group["decoupled_weight_decay"] = own["decoupled_weight_decay"]


class _SGD(_InPlace, FusedSGD):
    _lacks = ("maximize", "differentiable")
    _added: ClassVar = {"wd_after_momentum": False, "max_grad_norm": 0.0}
    materialize_master_grads, set_grad_none = True, False

    def _can_step(self) -> bool:
        return super()._can_step() and not any(
            param.grad is not None and param.grad.is_sparse
            for group in self.param_groups
            for param in group["params"]
            if param.dtype not in LOW_PRECISION  # Those have masters, which take no sparse one.
        )

    def _unfuse(self) -> None:
        self._drop_fresh_buffers()
        super()._unfuse()


_KINDS: Mapping[type, type[_InPlace]] = {
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _Adam,
    torch.optim.SGD: _SGD,
}


def fuse(optimizer: Any) -> bool:
    """Make an optimizer of torch step by the fused one that computes the same, with masters.

    Groups, state and hooks stay, and their layout in checkpoints. Weights equal those of torch with
    float32 weights within rounding.

    Args:
        optimizer: Any optimizer. Its class becomes a subclass of its own with the same name.

    Returns:
        Whether there is such a fused optimizer, with all options that are set; else nothing has
        changed.
    """
    cls = type(optimizer)
    if cls not in _KINDS:
        return False
    optimizer.__class__ = _fused_class(cls)
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update({**optimizer._added_options(group), **group, "master_weights": True})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not (optimizer._can_step() and _are_steppable(params)):
        optimizer._leave()
        return False
    optimizer._own_masters = MasterStore()
    states = {
        param: optimizer._adapt_state(f"{cls.__name__}: its state", state, param)
        for param, state in optimizer.state.items()
        if state
    }
    optimizer.state.update(unpack(states))
    return True


def _are_steppable(params: Iterable[Tensor]) -> bool:
    return not any(tensors.part_not_steppable(param) for param in params if param.requires_grad)


def _fused_class(cls: Any) -> Any:
    return class_with(_KINDS[cls], cls, {"_public_name": cls.__name__})


def _remake(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    optimizer = make(*args)
    optimizer.__class__ = _fused_class(type(optimizer))
    return optimizer
