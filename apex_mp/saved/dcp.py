"""Views of optimizers that torch.distributed.checkpoint.state_dict can save and load.

`get_state_dict(model, optimizer)` finds the name of each parameter of a group in the model, and
keeps two parts of the optimizer's state_dict: the state of each parameter and the options of each
group. Masters are not parameters of the model, and loss scales are in neither part; a view adds
both.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

_F = TypeVar("_F", bound=Callable[..., Any])
_CALLER = "torch.distributed.checkpoint.state_dict"
_CALLS_BETWEEN = 9  # at most, between torch's call of a step and the step: decorators
_MASTER, _EXTRA = "master_param", "loss_scaling"


def with_checkpoint_view(member: _F) -> _F:
    """Return the member of `self._checkpoint_view()` if torch.distributed.checkpoint is the caller.

    torch offers no hook for this: it reads `param_groups` and `state`, and calls `state_dict` and
    `load_state_dict`, as every caller does.
    """
    name = member.__name__

    @functools.wraps(member)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo does not support sys._getframe.
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and sys._getframe(1).f_globals.get("__name__") == _CALLER:
            view = getattr(self, "_checkpoint_view", None)
            if view is not None:
                return getattr(view(), name)(*args, **kwargs)
        return member(self, *args, **kwargs)

    return cast(_F, wrapper)


def is_called_for_state() -> bool:
    """Return whether torch.distributed.checkpoint is stepping, to make a new optimizer's state.

    Gradients and learning rates of such a step are 0, but the step is counted.
    """
    return caller_of(_CALLER) is not None


def caller_of(module: str) -> FrameType | None:
    """Return the frame of a module's function among the nearest callers, or None."""
    frame, calls = sys._getframe(1), 0
    while frame.f_back is not None and calls < _CALLS_BETWEEN:
        frame, calls = frame.f_back, calls + 1
        if frame.f_globals.get("__name__") == module:
            return frame
    return None


def attribute_with_checkpoint_view(name: str, own_class: type) -> property:
    """Return a member of a subclass that gives `own_class`'s attribute, or that of the view."""

    def get(self: Any) -> Any:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_globals["__name__"] == _CALLER:
            view = getattr(self, "_checkpoint_view", None)
            if view is not None:
                return getattr(view(), name)()
        if own is not None:
            return own.__get__(self)
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    def put(self: Any, value: Any) -> None:
        if own is not None:
            own.__set__(self, value)
        else:
            vars(self)[name] = value

    own: Any = getattr(own_class, name, None)  # A property of an optimizer around another.
    return property(get, put)


@dataclasses.dataclass(frozen=True)
class CheckpointView:
    """An optimizer with the parameters of the model in its groups.

    Attributes:
        optimizer: Has the groups and the state.
        load: Called with the optimizer's state_dict, a list of masters for each group (None for a
            parameter without one) and `extra`, as they were saved.
        model_of: The model parameter of each master.
        extra: Plain values that are saved too, in the options of each group.
        saves_masters: Whether masters are saved, in the state of their parameters.
    """

    optimizer: Any
    load: Callable[[dict[str, Any], list[list[Any]], dict[str, Any]], None]
    model_of: Mapping[Parameter, Parameter] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    saves_masters: bool = False

    def param_groups(self) -> list[dict[str, Any]]:
        """Return copies of the groups."""
        return [
            {**group, **self._extra(), "params": [self._model(param) for param in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def state(self) -> dict[Parameter, dict[str, Any]]:
        """Return the state by parameter, zeros before the first step."""
        with _with_state(self.optimizer):
            return {
                self._model(param): {**self.optimizer.state.get(param, {}), **self._master(param)}
                for group in self.optimizer.param_groups
                for param in group["params"]
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict with masters and `extra`; before the first step it has zeros."""
        with _with_state(self.optimizer):
            saved = self.optimizer.state_dict()
        state: dict[int, Any] = {}
        groups = []
        for saved_group, group in zip(
            saved["param_groups"], self.optimizer.param_groups, strict=True
        ):
            first = len(state)
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                master = {name: each.detach().clone() for name, each in self._master(param).items()}
                state[len(state)] = {**saved["state"].get(key, {}), **master}
            groups.append({**saved_group, **self._extra(), "params": [*range(first, len(state))]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or the state_dict of another optimizer."""
        groups = [{**group} for group in state_dict["param_groups"]]
        extras = [group.pop(_EXTRA, {}) for group in groups]
        state = {key: {**entry} for key, entry in state_dict["state"].items()}
        masters = {key: entry.pop(_MASTER, None) for key, entry in state.items()}
        self.load(
            {"state": {key: each for key, each in state.items() if each}, "param_groups": groups},
            [[masters.get(key) for key in group["params"]] for group in groups],
            next(iter(extras), {}),
        )

    def _model(self, param: Parameter) -> Parameter:
        return self.model_of.get(param, param)

    def _master(self, param: Parameter) -> dict[str, Tensor]:
        return {_MASTER: param} if self.saves_masters and param in self.model_of else {}

    def _extra(self) -> dict[str, Any]:
        return {_EXTRA: copy.deepcopy(self.extra)} if self.extra else {}


@contextlib.contextmanager
def _with_state(optimizer: Any) -> Iterator[None]:
    """Give an optimizer that took no step the state that others have, while the block runs.

    Its state is made as torch makes it, by a step with zero gradients and learning rate, and
    `step`, which counts steps, is set to 0.
    """
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"] if param.requires_grad]
    if optimizer.state or not params:
        yield
        return
    rates = [(group, group["lr"]) for group in groups if "lr" in group]
    grads = [param.grad for param in params]
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if torch.is_tensor(rate) else 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    try:
        # The method of the class: a guard would skip this step for the gradients set aside.
        type(optimizer).step(optimizer)
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0
    try:
        yield
    finally:
        optimizer.state.clear()
