"""Base classes of optimizers that wrap another optimizer and show its attributes as their own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from apex_mp.saved.dcp import with_checkpoint_view


class DelegatingOptimizer(torch.optim.Optimizer):
    """Has the parameter groups, the state and the defaults of the inner optimizer.

    Subclasses keep the inner optimizer in the attribute that `_inner_name` names. They do not call
    `torch.optim.Optimizer.__init__`, which would make parameter groups of their own.
    """

    _inner_name: ClassVar[str]

    @property
    @with_checkpoint_view
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        groups: list[dict[str, Any]] = _inner(self).param_groups
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        _inner(self).param_groups = value

    @property
    @with_checkpoint_view
    def state(self) -> Any:
        """The inner optimizer's state."""
        return _inner(self).state

    @state.setter
    def state(self, value: Any) -> None:
        _inner(self).state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        defaults: dict[str, Any] = _inner(self).defaults
        return defaults


class ForwardingOptimizer(DelegatingOptimizer):
    """Forwards all other attributes to the inner optimizer, whose step runs the hooks."""

    def __getattr__(self, name: str) -> Any:
        if name == self._inner_name:  # Not set yet: a copy is being made.
            raise AttributeError(name)
        return getattr(_inner(self), name)

    def __repr__(self) -> str:
        return repr(_inner(self))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: set them to None, or to zero."""
        _inner(self).zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        _inner(self).add_param_group(param_group)


def _inner(optimizer: DelegatingOptimizer) -> Any:
    # A function: a property that raised AttributeError would come back through __getattr__.
    return getattr(optimizer, optimizer._inner_name)
