"""Weights that a module computes whenever they are read, by properties of a class of its own."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_KEY = "_reparameterizations"


class Computes(Protocol):
    """The methods of `Reparameterization` that this module and the plans call."""

    dim: int | None
    reparameterization_names: list[str]

    def __init__(self, name: str, dim: int | None, module: nn.Module) -> None: ...

    def compute_weight(self, module: nn.Module | None = None, name: str | None = None) -> Tensor:
        """Return the weight."""

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[Sequence[str], Sequence[Parameter]]:
        """Return the names and values of new parameters."""


def computed(module: nn.Module) -> dict[str, Computes]:
    """Return the reparameterizations of a module's own attributes, by name."""
    present: dict[str, Computes] = module.__dict__.get(_KEY, {})
    return present


def start(module: nn.Module, name: str, reparameterization: Computes) -> None:
    """Compute the attribute `name` from now on; the module no longer has the parameter."""
    _become(module, {**computed(module), name: reparameterization})


def stop(module: nn.Module, name: str) -> None:
    """Stop computing the attribute `name`."""
    _become(module, {key: value for key, value in computed(module).items() if key != name})


def _become(module: nn.Module, reparameterizations: dict[str, Computes]) -> None:
    # A new dict each time: shallow copies of a module share the old one.
    module.__dict__[_KEY] = reparameterizations
    own = type(module)
    base: Any = vars(own).get("_base", own)
    if reparameterizations:
        module.__class__ = _class_of(base, tuple(sorted(reparameterizations)))
    else:
        del module.__dict__[_KEY]
        module.__class__ = base


@functools.cache
def _class_of(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass with the name of its base, so that `repr` and checks of it do not change.

    Cached, so that two modules of one class still have one class.
    """
    mixin = _ComputingRNN if issubclass(base, nn.RNNBase) else _Computing
    members: dict[str, Any] = {name: _attribute(name) for name in names}
    members |= {"_base": base, "_names": names, "__doc__": base.__doc__}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    made: type[nn.Module] = types.new_class(
        base.__name__,
        (base,) if issubclass(base, mixin) else (mixin, base),
        exec_body=lambda namespace: namespace.update(members),
    )
    return made


def _attribute(name: str) -> property:
    def read(module: nn.Module) -> Any:
        reparameterization = computed(module).get(name)
        if reparameterization is None:
            raise AttributeError(name)  # Then nn.Module looks among the parameters.
        try:
            return reparameterization.compute_weight(module, name)
        except AttributeError as error:
            # nn.Module would say that the module lacks this attribute, and drop the reason.
            raise RuntimeError(
                f"{type(reparameterization).__name__}.compute_weight, for the attribute {name!r} "
                f"of {type(module).__name__}: {error}"
            ) from error

    def write(module: nn.Module, value: Tensor) -> None:
        reparameterization = computed(module)[name]
        with torch.no_grad():
            names, params = reparameterization.reparameterize(
                name, value.detach(), reparameterization.dim
            )
            for own, param in zip(names, params, strict=True):
                getattr(module, own).copy_(param)

    return property(read, write)


class _Computing(nn.Module):
    """The base of the classes of `_class_of`, which makes them picklable."""

    _base: ClassVar[Any]
    _names: ClassVar[tuple[str, ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(protocol, 2))
        if isinstance(reduced, tuple) and reduced[:2] == (copyreg.__newobj__, (type(self),)):  # type: ignore[attr-defined]
            return _blank, (self._base, self._names), *reduced[2:]
        return reduced


def _blank(base: Any, names: tuple[str, ...]) -> nn.Module:
    """Return an object without state, which a pickle or a copy sets afterwards."""
    own = _class_of(base, names)
    return own.__new__(own)


class _ComputingRNN(_Computing, nn.RNNBase):
    """For torch's recurrent layers, which keep a list of the weights for the kernels."""

    def _update_flat_weights(self) -> None:
        # Called by each forward. torch's own method would compute the weights four times: to see
        # that they have changed, and again.
        self._flat_weights = [getattr(self, name, None) for name in self._flat_weights_names]
        self.flatten_parameters()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        # Results of autograd cannot be copied or pickled; the next forward computes them.
        state["_flat_weights"] = [
            None if name in computed(self) else weight
            for name, weight in zip(self._flat_weights_names, self._flat_weights, strict=True)
        ]
        return state
