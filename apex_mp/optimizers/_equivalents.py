"""The rules that compute what optimizers of torch do, in one pass and with masters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from apex_mp import _C
from apex_mp.core import options, tensors
from apex_mp.engine.engine import Engine
from apex_mp.masters.attach import own_class
from apex_mp.masters.layout import Rule
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.optimizers.fused_adam import FusedAdam
from apex_mp.optimizers.fused_sgd import FusedSGD

_Group: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Equivalent:
    """A rule that computes what an optimizer of torch does.

    Attributes:
        rule: The rule.
        lacks: Options that it does not have.
        options_of: Returns its options for a group of torch's.
        numbers: The options that are numbers.
    """

    rule: Rule
    lacks: tuple[str, ...]
    options_of: Callable[[_Group], dict[str, Any]]
    numbers: tuple[str, ...]


def _adam(is_adamw: bool) -> _Equivalent:
    def options_of(group: _Group) -> dict[str, Any]:
        # torch before 2.7 has no such option.
        decoupled = group.get("decoupled_weight_decay", is_adamw)
        return {"bias_correction": True, "eps_inside_sqrt": False, "adam_w_mode": decoupled}

    return _Equivalent(FusedAdam._rule, ("amsgrad", "differentiable"), options_of, ())


_KINDS: Mapping[type, _Equivalent] = {
    torch.optim.Adam: _adam(False),
    torch.optim.AdamW: _adam(True),
    torch.optim.SGD: _Equivalent(
        FusedSGD._rule,
        ("maximize", "differentiable"),
        lambda _: {"wd_after_momentum": False},
        ("dampening",),
    ),
}


class Equivalent:
    """Steps an optimizer of torch by the rule that computes the same, wherever there is one.

    Args:
        optimizer: The optimizer, with its addition.
        masters: `master_weights` of the groups.
    """

    def __init__(self, optimizer: Any, masters: bool | str) -> None:
        cls = own_class(type(optimizer))
        self._kind = _KINDS.get(cls)
        self._masters = masters
        self._engine = None if self._kind is None else Engine(self._kind.rule, cls.__name__)
        self._was_own = True  # The last step was torch's own.
        # Of the last step: options as the script has written them, and groups for the engine; None
        # if it did not take them. Then parameters, whether it took them, and those of 32 bits.
        self._options: list[dict[str, Any]] = []
        self._groups: list[dict[str, Any]] | None = None
        self._known: list[list[Tensor]] = []
        self._takes, self._wide = True, list[Tensor]()

    def groups_of(self, optimizer: Any) -> list[dict[str, Any]] | None:
        """Return the groups by which the engine can take the next step, or None if it cannot.

        A script may change options and gradients at any time to what only torch's class has.
        """
        if self._kind is None or _has_hooks(optimizer):
            return None
        given = optimizer.param_groups
        present = [{k: v for k, v in group.items() if k != "params"} for group in given]
        if present != self._options:
            self._options, self._groups = present, _translated(self._kind, present, self._masters)
        if self._groups is None or not self._can_step(given):
            return None
        for group, of_script in zip(self._groups, given, strict=True):
            group["params"] = of_script["params"]
        return self._groups

    def _can_step(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether the engine takes parameters and gradients."""
        is_known = len(self._known) == len(groups)
        for group, params in zip(groups, self._known, strict=False):
            is_known = is_known and _C.same_items(group["params"], params)
        if not is_known:
            self._known = [[*group["params"]] for group in groups]
            params = [param for group in self._known for param in group]
            self._takes = not any(
                tensors.part_not_steppable(p) or not tensors.has_kernels(p.device) for p in params
            )
            self._wide = [param for param in params if param.dtype not in LOW_PRECISION]
        for param in self._wide:
            if param.grad is not None and param.grad.is_sparse:
                return False
        return self._takes

    def engine_for(self, optimizer: Any) -> Engine:
        """Return the engine; states that torch's own step has written are made to fit."""
        assert self._engine is not None
        if self._was_own:
            layout, states = self._engine.rule.layout, optimizer.__dict__["state"]
            for param, state in states.items():
                if isinstance(param, Tensor):
                    states[param] = layout.moved(state, param)
            self._was_own = False
        return self._engine

    def leave(self, optimizer: Any) -> None:
        """Make the states those of torch's own class, which takes the next step or saves."""
        if self._kind is not None:
            self._kind.rule.tidy(optimizer.__dict__["state"])

    def step_own(self, optimizer: Any) -> None:
        """Note that torch's own class takes the next step."""
        self.leave(optimizer)
        self._was_own = True


def _translated(
    kind: _Equivalent, groups: list[dict[str, Any]], masters: bool | str
) -> list[dict[str, Any]] | None:
    """Return groups of torch's with the options of a rule, or None if it lacks one."""
    more = {"master_weights": masters}
    found = [{"max_grad_norm": 0.0, **g, **kind.options_of(g), **more} for g in groups]
    try:
        for group in found:
            options.check_group("", group)
            for name in kind.numbers:
                options.check_number("", name, group[name])
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if any(group.get(name) for group in found for name in kind.lacks) else found


def _has_hooks(optimizer: Any) -> bool:
    """Return whether a user's hooks meet gradients and masters, in float32 by torch's own step."""
    own = vars(optimizer)
    return bool(
        torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or own["_optimizer_step_pre_hooks"]
        or own["_optimizer_step_post_hooks"]
    )
