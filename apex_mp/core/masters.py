"""fp32 master parameters of low-precision model parameters, and the way between the two.

A master accumulates updates that are smaller than half an ulp of its fp16 weight; the model
computes with the copy. Masters of one parameter group on one device lie in one flat tensor, so that
they can be saved or edited as one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core.tensors import PLAIN_TYPES, is_dense

LOW_PRECISION = (torch.float16, torch.bfloat16)

# The property that torch gives every tensor; MasterParameter puts its own in front.
_TENSOR_GRAD: Any = torch.Tensor.grad


class Held(Protocol):
    """The masters of an optimizer.

    Attributes:
        model_of: The model parameter of each master.
    """

    model_of: dict[Parameter, Parameter]

    def model_params(self) -> list[Parameter]:
        """The model parameters of all masters."""

    def master_params(self) -> list[Parameter]:
        """All masters, in the same order."""

    def flats(self) -> list[Tensor]:
        """The elements of all masters, in as few tensors as there are."""

    def masters_of(self, params: Collection[int]) -> list[Tensor]:
        """Return the masters of parameters of the model, given by id()."""

    def copy_to_model(self) -> None:
        """Write each master, rounded, to the model."""


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

    Args:
        before_read: Called before a master's `grad` is read or set; None makes the masters
            plain Parameters, for which torch's optimizers have their fast paths.

    Attributes:
        params: The optimizer's list, which holds masters and own parameters.
        model_params: Low-precision parameters of the model that require grad.
        master_params: Their fp32 masters, in the same order.
        own_params: Parameters of float32 or float64, which are their own masters.
        frozen_params: Low-precision parameters that do not require grad now.
        flats: For each device one float32 vector; the masters are views into it.
    """

    def __init__(self, before_read: Callable[[], None] | None) -> None:
        self.params: list[Any] = []
        self.model_params: list[Parameter] = []
        self.master_params: list[Parameter] = []
        self.own_params: list[Parameter] = []
        self.frozen_params: list[Parameter] = []
        self.flats: dict[torch.device, Tensor] = {}
        self._before_read = _weak(before_read) if before_read is not None else None

    def adopt(self, params: list[Any]) -> dict[Parameter, Parameter]:
        """Put masters into the list `params` in place of its low-precision parameters.

        The list itself is changed, because optimizers such as LBFGS keep it. Can be called again
        when frozen parameters have come to require grad.

        Returns:
            The new masters, by model parameter.
        """
        self.params = params
        model_of = dict(zip(self.master_params, self.model_params, strict=True))
        new: dict[Parameter, Parameter] = {}
        self.own_params, self.frozen_params = [], []
        for index, param in enumerate(params):
            if param in model_of:
                continue
            if param.dtype not in LOW_PRECISION:
                self.own_params.append(param)
            elif not param.requires_grad:
                self.frozen_params.append(param)
            else:
                params[index] = new[param] = self._new_master(param)
        if new:
            model_of.update({master: model for model, master in new.items()})
            # In the order of the group, whenever a parameter came to require grad.
            self.master_params = [param for param in params if param in model_of]
            self.model_params = [model_of[master] for master in self.master_params]
            self._flatten()
        return new

    def _new_master(self, param: Parameter) -> Parameter:
        data = param.detach().float()
        if self._before_read is None:
            return Parameter(data)
        master = MasterParameter(data)
        master._before_read = self._before_read
        return master

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
        """All masters of this group as one vector; the next step sees writes, and writes the model.

        Raises:
            RuntimeError: The group's parameters lie on several devices.
        """
        if len(self.flats) > 1:
            raise RuntimeError(
                f"fp32_groups_flat: a group's fp16 parameters lie on {[*map(str, self.flats)]}; "
                "one tensor for them all exists only if they lie on one device"
            )
        return next(iter(self.flats.values()), torch.empty(0))

    def copy_to_model(self, except_for: Collection[int] = ()) -> None:
        """Write each master, rounded, to its model parameter, unless `except_for` has its id()."""
        pairs = [
            (model, master)
            for model, master in zip(self.model_params, self.master_params, strict=True)
            if id(model) not in except_for
        ]
        write(pairs)


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the second of each pair, rounded, to the first."""
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([model for model, _ in pairs], [master for _, master in pairs])


def rekey_state(state: Any, new: dict[Parameter, Parameter]) -> None:
    """Move what an optimizer knows of a parameter to its master, moments as float32."""
    for param, master in new.items():
        if param in state:
            state[master] = {
                key: value.float()
                if torch.is_tensor(value) and value.is_floating_point()
                else value
                for key, value in state.pop(param).items()
            }


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """The bound method, without keeping its object alive: masters outlive a dropped optimizer."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
