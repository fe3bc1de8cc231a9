"""Plans: which weights will be computed, and from what. All is checked before anything changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from apex_mp.core.log import logger, see
from apex_mp.reparameterization import _computed

R = TypeVar("R", bound=_computed.Computes)
_logger = logger("apex_mp.reparameterization")
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclasses.dataclass(frozen=True)
class Plan(Generic[R]):
    """The plan for one weight."""

    owner: nn.Module
    name: str
    reparameterization: R
    params: list[Parameter]

    def carry_out(self) -> None:
        """Replace the weight by the new parameters."""
        del self.owner._parameters[self.name]
        names = self.reparameterization.reparameterization_names
        for name, param in zip(names, self.params, strict=True):
            self.owner.register_parameter(name, param)
        _computed.start(self.owner, self.name, self.reparameterization)


def plan_one(kind: type[R], module: nn.Module, name: str, dim: int | None) -> Plan[R] | None:
    """Return the plan for one weight; None, with a log message, if it cannot be computed."""
    path, _, local = name.rpartition(".")
    owner = module.get_submodule(path)
    weight = _weight(owner, local, name)
    if isinstance(owner, EMBEDDINGS) or weight.dim() <= 1:
        _logger.warning(
            "%s is left as it is: it %s%s",
            name,
            "belongs to an embedding" if weight.dim() > 1 else "has no two dimensions",
            see("weight-norm"),
        )
        return None
    others = [other for other, _, _, param in _named(module) if param is weight and other != name]
    if others:
        raise _parted(name, others)
    return _plan(kind, owner, local, name, dim, None)


def plan_all(kind: type[R], module: nn.Module, dim: int | None, whole: nn.Module) -> list[Plan[R]]:
    """Return the plans for all weights of more than one dimension, except those of embeddings."""
    own = list(_named(module))
    parts = {*module.modules()}
    elsewhere = {param: name for name, owner, _, param in _named(whole) if owner not in parts}
    of_embeddings = {param for _, owner, _, param in own if isinstance(owner, EMBEDDINGS)}
    plans: dict[Parameter, Plan[R]] = {}
    result = []
    for full, owner, local, weight in own:
        present = _computed.computed(owner)
        for name, reparameterization in present.items():
            raise _already(full.removesuffix(local) + name, reparameterization)
        if isinstance(owner, ParametrizationList):
            raise ValueError(
                f"{full} is what torch.nn.utils.parametrize computes a weight from; remove that "
                "parametrization before, or give the names of the weights that you want"
            )
        if is_lazy(weight) or (weight.dim() > 1 and weight not in of_embeddings):
            if weight in elsewhere:
                raise _parted(full, [elsewhere[weight]])
            result.append(_plan(kind, owner, local, full, dim, plans.get(weight)))
            plans.setdefault(weight, result[-1])
    return result


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Parameter]]:
    """Yield full name, owner, own name and parameter, once for each name of a parameter."""
    for path, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is not None:
                yield f"{path}.{name}" if path else name, owner, name, param


def _weight(owner: nn.Module, local: str, full: str) -> Parameter:
    present = _computed.computed(owner).get(local)
    if present is not None:
        raise _already(full, present)
    weight = owner._parameters.get(local)
    if weight is None:
        raise ValueError(
            f"{full} is no parameter of {type(owner).__name__}, which has "
            f"{', '.join(owner._parameters) or 'none'}"
        )
    return weight


def _parted(full: str, others: list[str]) -> ValueError:
    return ValueError(
        f"{full} is one parameter with {', '.join(others)}, and would be parted from it; give "
        "no name, and they stay one, or give one of them a parameter of its own before"
    )


def _already(full: str, present: _computed.Computes) -> ValueError:
    return ValueError(
        f"{full} is computed by {type(present).__name__} already; call remove_reparameterization "
        "before"
    )


def _plan(
    kind: type[R],
    owner: nn.Module,
    local: str,
    full: str,
    dim: int | None,
    same: Plan[R] | None,
) -> Plan[R]:
    """Plan one weight; use the parameters of `same` if that is a plan for the same weight."""
    weight = owner._parameters[local]
    assert weight is not None
    if is_lazy(weight):
        raise ValueError(f"{full} has no shape yet; call the model once before")
    reparameterization = kind(local, dim, owner)
    names, params = reparameterization.reparameterize(local, weight, dim)
    said = f"{kind.__name__}.reparameterize({local!r}, ...)"
    if len(names) != len(params) or not all(isinstance(param, Parameter) for param in params):
        raise TypeError(
            f"{said} returned {len(names)} names and {[type(param).__name__ for param in params]};"
            " it must return a list of names and one of as many torch.nn.Parameter"
        )
    taken = [name for name in names if hasattr(owner, name)]
    if taken:
        raise ValueError(f"{said} wants the names {taken}, which {type(owner).__name__} has")
    reparameterization.reparameterization_names = [*names]
    if not weight.requires_grad:
        for param in params:
            param.requires_grad_(False)
    return Plan(owner, local, reparameterization, [*params] if same is None else same.params)
