"""float32 masters inside an optimizer that stays the user's own."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.amp.casting import is_low
from apex_mp.master import check_dtypes, rekey_state
from apex_mp.parallel import followers

# By parameter of the model. Optimizers with a parameter in common have one master of it.
Masters: TypeAlias = dict[Parameter, Parameter]


class OptimizerMasters:
    """Puts masters into an optimizer's groups, and keeps the model up with them.

    Args:
        optimizer: A torch optimizer; its groups and state are changed.
        originals: The float32 values of parameters before the model was cast: they become the
            masters, so nothing is lost by the cast.
        masters: All masters of the models; those of this optimizer are added.

    Attributes:
        model_of: The model's parameter of each master.
    """

    def __init__(
        self, optimizer: Any, originals: Mapping[Tensor, Tensor], masters: Masters
    ) -> None:
        self.model_of: dict[Parameter, Parameter] = {}
        self._optimizer = optimizer
        self._masters = masters
        self._grads_are_stale = False
        for group in optimizer.param_groups:
            check_dtypes(group["params"])
        for group in optimizer.param_groups:
            self._adopt(group["params"], originals)
        followers.add(self)
        optimizer._amp_masters = self
        optimizer._amp_model_of = self.model_of
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.zero_grad = functools.partial(self._zero_grad, optimizer.zero_grad)
        optimizer.add_param_group = functools.partial(
            self._add_param_group, optimizer.add_param_group
        )

    def _adopt(self, params: list[Parameter], originals: Mapping[Tensor, Tensor]) -> None:
        """Put masters into `params`, the very list, because optimizers such as LBFGS keep it."""
        new: Masters = {}
        for index, param in enumerate(params):
            if not is_low(param.dtype) or not param.requires_grad:
                continue
            if param not in self._masters:
                self._masters[param] = Parameter(originals.get(param, param).detach().float())
            params[index] = new[param] = self._masters[param]
        rekey_state(self._optimizer.state, new)
        self.model_of.update({master: model for model, master in new.items()})

    def masters_of(self, params: Collection[int]) -> list[Tensor]:
        """Return the masters of parameters of the model, given by id()."""
        return [master for master, model in self.model_of.items() if id(model) in params]

    def copy_to_model(self) -> None:
        """Write each master, rounded, to the model."""
        if self.model_of:
            with torch.no_grad():
                torch._foreach_copy_([*self.model_of.values()], [*self.model_of])

    # Gradients of masters are made when a block of scale_loss ends.

    def before_backward(self) -> None:
        """Make ready for gradients: those of a step that is over go, whoever cleared the model's.

        Parameters that require grad only now get masters.
        """
        for group in self._optimizer.param_groups:
            self._adopt(group["params"], {})
        if self._grads_are_stale:
            self._grads_are_stale = False
            for master in self.model_of:
                master.grad = None

    def _zero_grad(self, zero_grad: Any, set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        for model in self.model_of.values():
            if model.grad is not None:
                model.grad = None if set_to_none else model.grad.detach().zero_()

    # Steps.

    def _before_step(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if len(args) < 2 and "closure" not in kwargs:
            self._refuse_plain_backward()
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._with_new_weights(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._with_new_weights(kwargs["closure"])}
        return None

    def _refuse_plain_backward(self) -> None:
        """Raise if a backward outside of scale_loss left the masters without gradients."""
        has_grads = [
            any(param.grad is not None for param in params)
            for params in (self.model_of.values(), self.model_of)
        ]
        if has_grads == [True, False] and not self._grads_are_stale:
            raise RuntimeError(
                "step() found gradients of the model, but none of its float32 masters; call "
                "backward in `with amp.scale_loss(loss, optimizer) as scaled_loss:`"
            )

    def _with_new_weights(self, closure: Any) -> Any:
        @functools.wraps(closure)
        def wrapper() -> Any:
            self.copy_to_model()
            return closure()

        return wrapper

    def _after_step(self, *_: Any) -> None:
        self.copy_to_model()
        self._grads_are_stale = True

    def _add_param_group(self, add_param_group: Any, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        if not isinstance(given, (Tensor, set)):  # torch refuses sets.
            given = param_group["params"] = [*given]
            plain = [param[1] if isinstance(param, tuple) else param for param in given]
        else:
            plain = [*given] if isinstance(given, set) else [given]
        if any(param is model for param in plain for model in self.model_of.values()):
            raise ValueError("some parameters appear in more than one parameter group")
        add_param_group(param_group)
        self._adopt(self._optimizer.param_groups[-1]["params"], {})


def share_masters(model: torch.nn.Module, masters: Masters) -> None:
    """Let a model and each part of it save its masters' values, and load them back."""
    share = MasterState(masters)
    for module in model.modules():
        # torch writes an attribute to a hook, which a method has no room for.
        save, load = functools.partial(share.save), functools.partial(share.load)
        module.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]


class MasterState:
    """What modules in low precision do about their masters when they save and load.

    Args:
        masters: By parameter of the model. None: of a copy of the model, which is not what the
            optimizers step; its own values are all it has.
    """

    def __init__(self, masters: Masters | None) -> None:
        self._masters = masters

    def __reduce__(self) -> Any:
        return MasterState, (None,)

    def save(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put float32 values in place of a module's own in low precision."""
        if self._masters is None:
            return
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is not None and is_low(tensor.dtype) and prefix + name in state:
                master = self._masters.get(tensor)  # type: ignore[call-overload]
                state[prefix + name] = tensor.float() if master is None else master.detach()

    def load(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Write what a module is about to load to its masters, before it is rounded."""
        if self._masters is None:
            return
        for name, param in module._parameters.items():
            master = None if param is None else self._masters.get(param)
            value = state.get(prefix + name)
            # What does not fit is for load_state_dict to refuse.
            if master is not None and torch.is_tensor(value) and value.shape == master.shape:
                with torch.no_grad():
                    master.copy_(value)
