"""fp32 master parameters of low-precision model parameters, and the way between the two.

A master accumulates updates that are smaller than half an ulp of its fp16 weight; the model
computes with the copy. Masters of one parameter group on one device lie in one flat tensor, so that
they can be saved or edited as one.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core import tensors
from apex_mp.core.tensors import PLAIN_TYPES, is_dense, match_strides

LOW_PRECISION = (torch.float16, torch.bfloat16)
_MODEL_PARAMS, _MASTER_PARAMS, _FP32_PARAMS = map(
    operator.attrgetter, ("model_params", "master_params", "fp32_params")
)

# The property that torch gives every tensor; MasterParameter puts its own in front.
_TENSOR_GRAD: Any = torch.Tensor.grad


class Masters:
    """The masters of an optimizer, which stand in the parameter lists of its groups.

    Attributes:
        model_of: The model parameter of each master.
    """

    def __init__(self) -> None:
        self.model_of: dict[Parameter, Parameter] = {}

    def adopt(
        self, params: list[Any], state: Any, new_master: Callable[[Parameter], Parameter]
    ) -> None:
        """Put masters into a list in place of low-precision parameters that require grad.

        Call it again when more parameters require grad than before. `params` is changed in place,
        because optimizers such as LBFGS keep it; the state moves to the masters.
        """
        new: dict[Parameter, Parameter] = {}
        for index, param in enumerate(params):
            if param.dtype in LOW_PRECISION and param.requires_grad:
                params[index] = new[param] = new_master(param)
        for param, master in new.items():
            if param in state:
                state[master] = {key: widened(value) for key, value in state.pop(param).items()}
        self.model_of.update({master: model for model, master in new.items()})

    def masters_of(self, params: Collection[int]) -> list[Tensor]:
        """Return the masters of parameters of the model, given by id()."""
        return [master for master, model in self.model_of.items() if id(model) in params]

    def model_params(self) -> list[Parameter]:
        """The model parameters of all masters."""
        return [*self.model_of.values()]

    def master_params(self) -> list[Parameter]:
        """All masters, in the same order."""
        return [*self.model_of]

    def flats(self) -> list[Tensor]:
        """The tensors that hold the elements of all masters; a flat tensor holds those of many."""
        return [*self.model_of]

    def copy_to_model(self, except_for: Collection[int] = ()) -> None:
        """Write each master, rounded, to its model parameter, unless `except_for` has its id()."""
        pairs = zip(self.model_params(), self.master_params(), strict=True)
        write([(model, master) for model, master in pairs if id(model) not in except_for])


def widened(value: Any) -> Any:
    """Return a floating tensor in float32, and anything else as it is."""
    return tensors.cast_floating(value, torch.float32)


class MasterParameter(Parameter):
    """An fp32 master whose `grad` is materialized when it is first read.

    Until then the gradient is the model's own, scaled and in low precision, and a fused optimizer
    steps with that one. Reading `grad` costs a pass and memory; not reading it costs nothing.
    """

    _before_read: Callable[[], None] | None = None

    @property
    def grad(self) -> Tensor | None:
        """The unscaled gradient in float32, or None; edits of it count."""
        if self._before_read is not None:
            self._before_read()
        grad: Tensor | None = _TENSOR_GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if self._before_read is not None:
            self._before_read()
        _TENSOR_GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved, it is a parameter like any other.
        plain = Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


PLAIN_TYPES.add(MasterParameter)


def stored_grad(param: Tensor) -> Tensor | None:
    """Return the gradient that a parameter holds now, without making one."""
    grad: Tensor | None = _TENSOR_GRAD.__get__(param)
    return grad


def store_grad(param: Tensor, grad: Tensor | None) -> None:
    """Set the gradient that a parameter holds, without making one first."""
    _TENSOR_GRAD.__set__(param, grad)


class MasterGroup:
    """The masters of one parameter group.

    Attributes:
        params: The optimizer's list, which holds masters and fp32 parameters.
        model_params: Low-precision parameters of the model that require grad.
        master_params: Their fp32 masters, in the same order.
        fp32_params: Parameters of float32 or float64, which are their own masters.
        frozen_params: Low-precision parameters that do not require grad now.
        flats: For each device one float32 vector; the masters are views into it.
    """

    def __init__(self) -> None:
        self.params: list[Any] = []
        self.model_params: list[Parameter] = []
        self.master_params: list[Parameter] = []
        self.fp32_params: list[Parameter] = []
        self.frozen_params: list[Parameter] = []
        self.flats: dict[torch.device, Tensor] = {}

    def arrange(self, params: list[Any], model_of: Mapping[Parameter, Parameter]) -> None:
        """Sort a list that masters were put into."""
        self.params = params
        rest = [param for param in params if param not in model_of]
        self.fp32_params = [param for param in rest if param.dtype not in LOW_PRECISION]
        self.frozen_params = [param for param in rest if param.dtype in LOW_PRECISION]
        known = len(self.master_params)
        # In the order of the group, not that in which parameters began to require grad.
        self.master_params = [param for param in params if param in model_of]
        self.model_params = [model_of[master] for master in self.master_params]
        if len(self.master_params) > known:
            self._flatten()

    def _flatten(self) -> None:
        sizes: dict[torch.device, int] = {}
        for master in self.master_params:
            sizes[master.device] = sizes.get(master.device, 0) + master.numel()
        self.flats = {
            device: torch.empty(size, dtype=torch.float32, device=device)
            for device, size in sizes.items()
        }
        used = dict.fromkeys(sizes, 0)
        for master in self.master_params:
            start = used[master.device]
            used[master.device] += master.numel()
            place = self.flats[master.device][start : used[master.device]]
            # A dense layout such as channels_last is kept: element i stays element i in memory.
            dense = master.data if is_dense(master) else master.data.contiguous()
            view = place.as_strided(dense.size(), dense.stride())
            view.copy_(dense)
            master.data = view

    @property
    def flat(self) -> Tensor:
        """All masters of this group as one vector; what is written counts in the next step."""
        if len(self.flats) > 1:
            raise RuntimeError(
                f"fp32_groups_flat: a group's fp16 parameters lie on {[*map(str, self.flats)]}; "
                "one tensor for them all exists only if they lie on one device"
            )
        return next(iter(self.flats.values()), torch.empty(0))


class GroupedMasters(Masters):
    """Masters that lie group by group in flat tensors.

    Args:
        before_read: Called before a master's `grad` is read or set; None makes the masters plain
            Parameters, for which torch's optimizers have their fast paths.
        dense: Parameters must be dense, because the optimizer itself writes the model's.

    Attributes:
        groups: The masters of each parameter group.
    """

    def __init__(self, before_read: Callable[[], None] | None, *, dense: bool) -> None:
        super().__init__()
        self.groups: list[MasterGroup] = []
        self._before_read = None if before_read is None else _weak(before_read)
        self._dense = dense

    def check_new(self, number: int, params: list[Any], names: Sequence[str] | None = None) -> None:
        """Raise if the parameters of a group cannot be adopted."""

        def reason(param: Tensor) -> str | None:
            unreadable = tensors.not_readable(param)
            return tensors.not_dense(param) if unreadable is None and self._dense else unreadable

        tensors.check_params("FP16_Optimizer", number, params, reason, names)
        if not {id(model) for model in self.model_params()}.isdisjoint(map(id, params)):
            raise ValueError("some parameters appear in more than one parameter group")

    def add_group(self, param_group: dict[str, Any], state: Any) -> None:
        """Put masters into a new parameter group, and move the optimizer's state to them."""
        self.check_new(len(self.groups), param_group["params"])
        group = MasterGroup()
        self._adopt_into(group, param_group, state)
        self.groups.append(group)

    def adopt_unfrozen(self, param_groups: list[dict[str, Any]], state: Any) -> None:
        """Make masters for parameters that require grad now and have none."""
        if len(param_groups) < len(self.groups):
            raise RuntimeError(
                f"FP16_Optimizer: the inner optimizer has {len(param_groups)} parameter groups "
                f"left of {len(self.groups)} that have masters; groups may be added, not removed"
            )
        for group, param_group in zip(self.groups, param_groups, strict=False):
            if group.frozen_params and any(p.requires_grad for p in group.frozen_params):
                self._adopt_into(group, param_group, state)

    def _adopt_into(self, group: MasterGroup, param_group: dict[str, Any], state: Any) -> None:
        self.adopt(param_group["params"], state, self._new_master)
        group.arrange(param_group["params"], self.model_of)

    def _new_master(self, param: Parameter) -> Parameter:
        data = param.detach().float()
        if self._before_read is None:
            return Parameter(data)
        master = MasterParameter(data)
        master._before_read = self._before_read
        return master

    def model_params(self) -> list[Parameter]:
        """The model's low-precision parameters of all groups."""
        return [*chain.from_iterable(map(_MODEL_PARAMS, self.groups))]

    def master_params(self) -> list[Parameter]:
        """Their masters, in the same order."""
        return [*chain.from_iterable(map(_MASTER_PARAMS, self.groups))]

    def fp32_params(self) -> list[Parameter]:
        """The parameters of all groups that are their own masters."""
        return [*chain.from_iterable(map(_FP32_PARAMS, self.groups))]

    def flats(self) -> list[Tensor]:
        """The flat tensors of all groups, in which the masters lie."""
        return [flat for group in self.groups for flat in group.flats.values()]

    def visible_params(self) -> list[Parameter]:
        """The parameters that get gradients from backward."""
        return self.model_params() + self.fp32_params()

    def plain_grads(self, params: list[Parameter]) -> list[Tensor]:
        """Return the gradients of parameters for writing; those that are not plain are replaced."""
        given = [param for param in params if param.grad is not None]
        plain = [self.plain(existing_grad(param), param) for param in given]
        for param, grad in zip(given, plain, strict=True):
            if param.grad is not grad:
                param.grad = grad
        return plain

    def plain(self, grad: Tensor, param: Parameter) -> Tensor:
        """Return the gradient with its elements in memory in the order of a parameter."""
        if tensors.is_usual(grad) and param.is_contiguous():
            return grad
        plain = match_strides(grad, param)
        reason = tensors.not_readable(plain)
        if reason is not None:
            raise RuntimeError(f"FP16_Optimizer: grads{self._place_of(param)} {reason}")
        return plain

    def _place_of(self, param: Parameter) -> str:
        """Return "[group][index]" of a parameter of the model, or of its master, for messages."""
        for number, group in enumerate(self.groups):
            for index, own in enumerate(group.params):
                if own is param or self.model_of.get(own) is param:
                    return f"[{number}][{index}]"
        return ""


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the second of each pair, rounded, to the first."""
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([model for model, _ in pairs], [master for _, master in pairs])


def existing_grad(param: Parameter) -> Tensor:
    """Return the gradient of a parameter that has one."""
    grad = param.grad
    assert grad is not None  # The caller has looked.
    return grad


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the bound method but does not keep its object alive.

    Masters may outlive the optimizer.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
