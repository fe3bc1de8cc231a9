"""float32 masters inside an optimizer that stays the user's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.amp.casting import is_low
from apex_mp.master import MasterGroup, rekey_state


class OptimizerMasters:
    """Puts masters into an optimizer's groups, and keeps the model up with them.

    Args:
        optimizer: A torch optimizer; its groups and state are changed.
        originals: The float32 values of parameters before the model was cast: masters start there,
            so nothing is lost by the cast.

    Attributes:
        model_of: The model's parameter of each master.
    """

    def __init__(self, optimizer: Any, originals: Mapping[Tensor, Tensor]) -> None:
        self.model_of: dict[Parameter, Parameter] = {}
        self._groups: list[MasterGroup] = []
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            self._adopt(group, originals)
        optimizer._amp_model_of = self.model_of
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.zero_grad = functools.partial(self._zero_grad, optimizer.zero_grad)
        optimizer.add_param_group = functools.partial(
            self._add_param_group, optimizer.add_param_group
        )

    def _adopt(self, param_group: dict[str, Any], originals: Mapping[Tensor, Tensor]) -> None:
        group = MasterGroup(None)
        new = group.adopt(param_group["params"])
        rekey_state(self._optimizer.state, new)
        for model, master in new.items():
            self.model_of[master] = model
            if model in originals:
                master.data.copy_(originals[model])
        self._groups.append(group)

    def copy_to_model(self) -> None:
        """Write each master, rounded, to the model."""
        for group in self._groups:
            group.copy_to_model()

    def _before_step(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._with_new_weights(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._with_new_weights(kwargs["closure"])}
        return None

    def _with_new_weights(self, closure: Any) -> Any:
        @functools.wraps(closure)
        def wrapper() -> Any:
            self.copy_to_model()
            return closure()

        return wrapper

    def _after_step(self, *_: Any) -> None:
        self.copy_to_model()

    def _zero_grad(self, zero_grad: Any, set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        for model in self.model_of.values():
            if model.grad is not None:
                model.grad = None if set_to_none else model.grad.detach().zero_()

    def _add_param_group(self, add_param_group: Any, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        params = [given] if torch.is_tensor(given) else list(given)
        known = {id(model) for model in self.model_of.values()}
        plain = [param[1] if isinstance(param, tuple) else param for param in params]
        if not known.isdisjoint(map(id, plain)):
            raise ValueError("some parameters appear in more than one parameter group")
        add_param_group({**param_group, "params": params})
        self._adopt(self._optimizer.param_groups[-1], {})


class MasterState:
    """Lets a model save its masters' values instead of rounded ones, and load them back.

    A copy of the model is not what the optimizers step, so its own values are all it has.

    Args:
        masters: The masters of all optimizers of its parameters.
    """

    def __init__(self, masters: list[OptimizerMasters]) -> None:
        self._masters = masters

    def attach(self, model: torch.nn.Module) -> None:
        """Be called when the model saves or loads."""
        # torch writes an attribute to a hook, which a method has no room for.
        save, load = functools.partial(self._save), functools.partial(self._load)
        model.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return MasterState, ([],)

    def _master_of(self) -> dict[int, Parameter]:
        pairs = (pair for masters in self._masters for pair in masters.model_of.items())
        return {id(model): master for master, model in pairs}

    def _save(self, model: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        master_of = self._master_of()
        params = dict(model.named_parameters(remove_duplicate=False))
        for key in [key for key in state if key.startswith(prefix)]:
            value = state[key]
            if not torch.is_tensor(value) or not is_low(value.dtype):
                continue
            master = master_of.get(id(params.get(key[len(prefix) :])))
            state[key] = value.float() if master is None else master.detach()

    def _load(self, model: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        master_of = self._master_of()
        with torch.no_grad():
            for name, param in model.named_parameters(remove_duplicate=False):
                value, master = state.get(prefix + name), master_of.get(id(param))
                fits = torch.is_tensor(value) and master is not None and value.shape == master.shape
                if fits:  # What does not fit is for load_state_dict to say.
                    assert master is not None
                    assert value is not None
                    master.copy_(value)
