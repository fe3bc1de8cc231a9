"""Make weights of a model computed from other parameters, and make them parameters again."""

from __future__ import annotations

from torch import nn
from torch.nn import Parameter

from apex_mp.reparameterization import _computed, _plan
from apex_mp.reparameterization.reparameterization import Reparameterization
from apex_mp.reparameterization.weight_norm import WeightNorm


def apply_weight_norm(
    module: nn.Module, name: str = "", dim: int | None = 0, hook_child: bool = True
) -> nn.Module:
    """Compute weights as `g * v / |v|`; see `WeightNorm`.

    The values of the weights do not change. Make the optimizer afterwards: the parameters are then
    `weight_g` and `weight_v`, in place of `weight`.

    Args:
        module: Changed in place.
        name: One weight of it, or of a module in it: "rnn.weight_hh_l0". "": all weights of more
            than one dimension, except those of embeddings; "rnn": all such weights of that module
            [""].
        dim: The dimension over which no norm is taken; None: one norm for the whole weight [0].
        hook_child: Unused: there is no hook [True].

    Returns:
        The module.

    Raises:
        ValueError: As for `apply_reparameterization`; or a weight has no dimension `dim`.
    """
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Make weights parameters again, with the values they have; see `remove_reparameterization`.

    Args:
        module: Changed in place.
        name: As of `remove_reparameterization` [""].
        remove_all: As of `remove_reparameterization` [False].

    Returns:
        The module.
    """
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> nn.Module:
    """Compute weights by `reparameterization` whenever they are read.

    A parameter with several names stays one parameter if all of them are in `module` and no name is
    given; it is not changed if one of the names is an embedding's.

    Args:
        module: Changed in place.
        reparameterization: `WeightNorm`, or another subclass of `Reparameterization`; the class.
        name: As for `apply_weight_norm` [""].
        dim: For the constructor of `reparameterization` [0].
        hook_child: Unused: there is no hook [True].

    Returns:
        The module.

    Raises:
        TypeError: `reparameterization` is no subclass of `Reparameterization`.
        AttributeError: A module on the path to the weight does not exist.
        ValueError: A weight does not exist, is computed already, has no shape yet, or has another
            name in `module` besides the one given. Nothing is changed then.
    """
    if not isinstance(reparameterization, type) or not issubclass(
        reparameterization, Reparameterization
    ):
        raise TypeError(
            f"apply_reparameterization: reparameterization is {reparameterization!r}; it must be a "
            "subclass of Reparameterization, such as WeightNorm"
        )
    part = dict(module.named_modules(remove_duplicate=False)).get(name)
    if part is None:
        Reparameterization.apply(module, name, dim, reparameterization, hook_child)
    else:
        for plan in _plan.plan_all(reparameterization, part, dim, module):
            plan.carry_out()
    return module


def remove_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> nn.Module:
    """Make weights parameters again, with the values they have.

    To train on, make a new optimizer afterwards.

    Args:
        module: Changed in place.
        reparameterization: Only weights computed by this class or a subclass of it [any].
        name: One weight of `module`, or of a module in it. "": all, of the modules in it too [""].
        remove_all: Remove all, whatever `name` says [False].

    Returns:
        The module.

    Raises:
        ValueError: `name` is given, and no such weight is computed by `reparameterization`.
    """
    found = [
        (owner, present)
        for owner in module.modules()
        for present in _computed.computed(owner).values()
        if isinstance(present, reparameterization)
    ]
    if name and not remove_all:
        path, _, local = name.rpartition(".")
        owners = [owner for at, owner in module.named_modules(remove_duplicate=False) if at == path]
        found = [(owner, p) for owner, p in found if owner in owners and p.name == local]
        if not found:
            raise ValueError(f"reparameterization of '{name}' not found in {module}")
    # Names that shared one parameter share one again.
    restored: dict[tuple[Parameter, ...], Parameter] = {}
    for owner, present in found:
        params = tuple(present.get_params(owner))
        same = restored.get(params) if params else None
        restored[params] = present.remove(owner, same)
    return module
