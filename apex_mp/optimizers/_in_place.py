"""Optimizers of torch that step by a fused one, with float32 masters, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.masters.class_with import class_with, own_class
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers._state import MASTER, unpack
from apex_mp.optimizers.fused_adam import FusedAdam
from apex_mp.optimizers.fused_sgd import FusedSGD


class _Twin(NamedTuple):
    """The fused optimizer that computes what one of torch does.

    Attributes:
        fused: Its class.
        lacks: Options of torch's that it does not have.
        options: Options that torch's does not have.
        attributes: Attributes that its constructor sets.
    """

    fused: type[FusedOptimizer]
    lacks: tuple[str, ...]
    options: Mapping[str, Any]
    attributes: Mapping[str, Any]


_ADAM = _Twin(
    FusedAdam,
    ("amsgrad", "differentiable"),
    {"bias_correction": True, "eps_inside_sqrt": False, "max_grad_norm": 0.0},
    {},
)
_TWINS: Mapping[type, _Twin] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: _Twin(
        FusedSGD,
        ("maximize", "differentiable"),
        {"wd_after_momentum": False, "max_grad_norm": 0.0},
        {"materialize_master_grads": True, "set_grad_none": False},
    ),
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
    twin = _TWINS.get(cls)
    if twin is None:
        return False
    groups = [optimizer.defaults, *optimizer.param_groups]
    whole = [{**twin.options, **_own_options(cls, group), **group} for group in groups]
    if any(group.get(name) for group in groups for name in twin.lacks):
        return False
    optimizer.__class__ = _fused_class(cls)
    try:
        for number, group in enumerate(whole):
            optimizer._check_new_options(group)
            params = group.get("params", ())
            tensors.check_params(cls.__name__, number, params, tensors.part_not_steppable)
    except (RuntimeError, TypeError, ValueError):
        optimizer.__class__ = cls
        return False
    for group, options in zip(groups, whole, strict=True):
        group.update(options, master_weights=True)
    optimizer._patch_step_function()  # So that the step calls hooks.
    states = {
        param: optimizer._adapt_state(f"{cls.__name__}: its state", state, param)
        for param, state in optimizer.state.items()
        if state
    }
    optimizer.state.update(unpack(states))
    return True


def put_masters(optimizer: Any, masters: Mapping[Tensor, Tensor]) -> None:
    """Replace masters of a fused optimizer.

    Args:
        optimizer: The optimizer, with `master_weights=True`.
        masters: A float32 tensor for each of some parameters.
    """
    layout = optimizer._state_layout
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in masters:
                state = {**optimizer.state.get(param, {}), MASTER: masters[param].clone()}
                # The state of an SGD may lack a buffer; that of an Adam is whole in checkpoints.
                whole = layout.completed(state, param, group) if layout.numbers else state
                optimizer.state[param] = whole


def _own_options(cls: type, group: Mapping[str, Any]) -> dict[str, Any]:
    if _TWINS[cls] is not _ADAM:
        return {}
    # torch before 2.7 has no such option.
    decoupled = group.get("decoupled_weight_decay", cls is torch.optim.AdamW)
    return {"adam_w_mode": decoupled}


def _fused_class(cls: Any) -> Any:
    twin = _TWINS[cls]

    def make(kind: type, *args: Any, **options: Any) -> Any:
        """Return an optimizer of torch's class: `type(optimizer)(params)` has no masters."""
        return cls(*args, **options)

    members = {
        **twin.attributes,
        "_public_name": cls.__name__,
        "__new__": make,
        "__reduce_ex__": _reduce,
    }
    return class_with(twin.fused, cls, members)


def _reduce(optimizer: Any, protocol: Any) -> Any:
    """Copy or pickle as the optimizer's own class does."""
    kind = type(optimizer)
    make, args, *items = super(kind, optimizer).__reduce_ex__(protocol)
    own = own_class(kind)
    return _remake, (make, tuple(own if each is kind else each for each in args)), *items


def _remake(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    optimizer = make(*args)
    optimizer.__class__ = _fused_class(type(optimizer))
    return optimizer
