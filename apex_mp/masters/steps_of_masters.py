"""Whether an optimizer that has masters in its lists of parameters steps them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp.grads.found_inf import norms
from apex_mp.masters.masters import Masters

# Of masters, and of their model parameters.
_Norms: TypeAlias = tuple[list[float], list[float]]


def check_lists(caller: str, optimizer: Any, dtypes: Collection[torch.dtype]) -> None:
    """Refuse an optimizer that steps through a nested optimizer with parameter lists of its own.

    Masters are put into the lists of `param_groups`, which the nested optimizer does not read.
    """
    lists = {id(group["params"]) for group in optimizer.param_groups}
    replaced = {
        id(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if isinstance(param, Tensor) and param.dtype in dtypes
    }
    for name, nested in _nested(optimizer):
        own = [group["params"] for group in nested.param_groups if id(group["params"]) not in lists]
        if any(id(param) in replaced for params in own for param in params):
            raise TypeError(
                f"{caller}: {type(optimizer).__name__} steps its parameters by its {name}, "
                f"of type {type(nested).__name__}, which has lists of its own and would not get "
                "the float32 masters; use an optimizer that steps what is in its param_groups, "
                f"or {type(optimizer).__name__} with float32 parameters and torch.autocast"
            )


def _nested(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield optimizers among an optimizer's attributes, or in a list of one, with their names."""
    for name, value in vars(optimizer).items():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, torch.optim.Optimizer):
                yield name, each
                yield from ((f"{name}.{deeper}", found) for deeper, found in _nested(each))


class StepWatch:
    """Detects an optimizer that steps the model's parameters instead of their masters.

    Args:
        caller: The class or function, for the message.
        masters: The masters and their model parameters.
    """

    def __init__(self, caller: str, masters: Masters) -> None:
        self._caller = caller
        self._masters = masters
        self._steps_masters = False
        self._before: _Norms | None = None

    def before_step(self) -> None:
        """Remember all weights; once a step has written masters this does nothing."""
        self._before = None if self._steps_masters else self._norms()

    def after_step(self, optimizer: Any) -> None:
        """Write the masters to the model."""
        before, self._before = self._before, None
        after = None if before is None else self._norms()
        self._masters.copy_to_model()
        if before is None or after is None:
            return
        self._steps_masters = before[0] != after[0]
        # A step with a learning rate of zero writes neither.
        if not self._steps_masters and before[1] != after[1]:
            raise RuntimeError(
                f"{self._caller}: {type(optimizer).__name__}.step() has written the model's "
                "parameters, and not the float32 masters that are in its param_groups; it must "
                "step the parameters that it finds there"
            )

    def _norms(self) -> _Norms:
        return norms(self._masters.master_params()), norms(self._masters.model_params())
