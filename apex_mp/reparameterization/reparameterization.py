"""The base class of objects that compute a weight from other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from apex_mp.reparameterization import _computed, _plan


class Reparameterization:
    """Computes a module's weight from other parameters, whenever the weight is read.

    In a subclass `reparameterize` returns the parameters that replace the weight, and
    `compute_weight` computes the weight from them; `apply_reparameterization` uses the subclass.

    Args:
        name: The weight's name in its module.
        dim: Its meaning is up to the subclass; may be None.
        module: The module that has the weight.
        retain_forward: Unused: no weight is kept [True].

    Attributes:
        reparameterization_names: The names of the parameters that replaced the weight.
    """

    def __init__(
        self, name: str, dim: int | None, module: nn.Module, retain_forward: bool = True
    ) -> None:
        self.name = name
        self.dim = dim
        self.module = module
        self.retain_forward = retain_forward
        self.reparameterization_names: list[str] = []

    def compute_weight(self, module: nn.Module | None = None, name: str | None = None) -> Tensor:
        """Return the weight; gradients flow through it to the parameters.

        Args:
            module: The module that has the parameters, which may be a copy [the module of the
                constructor].
            name: The weight's name there [the name of the constructor].
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_weight")

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[Sequence[str], Sequence[Parameter]]:
        """Return the names and values of new parameters, in the order of registration.

        Args:
            name: The weight's name in its module.
            weight: Its value.
            dim: That of the constructor.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reparameterize")

    @staticmethod
    def apply(
        module: nn.Module,
        name: str,
        dim: int | None,
        reparameterization: type[Reparameterization] | None = None,
        hook_child: bool = True,
    ) -> Reparameterization | None:
        """Make one weight computed, and return the object that computes it.

        Args:
            module: The module that has the weight, or an ancestor.
            name: The weight's name in `module`, such as "rnns.0.w_hh".
            dim: For the constructor of `reparameterization`.
            reparameterization: The class; its instance is made here [this class, which computes
                nothing].
            hook_child: Unused: there is no hook [True].

        Returns:
            The instance; None if the weight is not changed, because it has fewer than two
            dimensions or belongs to an embedding.

        Raises:
            ValueError: The weight does not exist, is computed already, or has another name too.
        """
        kind = Reparameterization if reparameterization is None else reparameterization
        plan = _plan.plan_one(kind, module, name, dim)
        if plan is None:
            return None
        plan.carry_out()
        return plan.reparameterization

    @staticmethod
    def get_module_and_name(module: nn.Module, name: str) -> tuple[Any, Any]:
        """Return the module at "path.to" and "weight" for "path.to.weight"; None twice for "".

        Args:
            module: The root.
            name: The path of a weight, of names and dots.
        """
        if not name:
            return None, None
        *path, local = name.split(".")
        for part in path:
            module = getattr(module, part)
        return module, local

    def get_params(self, module: nn.Module) -> list[Parameter]:
        """Return the parameters from which the weight is computed.

        Args:
            module: The module that has the weight.
        """
        return [getattr(module, name) for name in self.reparameterization_names]

    def remove(self, module: nn.Module, weight: Parameter | None = None) -> Parameter:
        """Make the weight a parameter again, and return it.

        Args:
            module: The module that has the weight.
            weight: The parameter to set [a new one with the weight's value, which requires grad if
                a parameter that it is computed from does].

        Raises:
            ValueError: The weight is computed from something that is no longer a parameter.
        """
        gone = [n for n in self.reparameterization_names if n not in module._parameters]
        if gone:
            raise ValueError(
                f"{self.name} of {type(module).__name__} is computed from {', '.join(gone)}, which "
                "is no parameter any more; undo first what was done to it"
            )
        params = self.get_params(module)
        if weight is None:
            with torch.no_grad():
                value = self.compute_weight(module, self.name).detach()
            weight = Parameter(value, requires_grad=any(param.requires_grad for param in params))
        for name in self.reparameterization_names:
            del module._parameters[name]
        _computed.stop(module, self.name)
        module.register_parameter(self.name, weight)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # type: ignore[no-untyped-call, unused-ignore]
        return weight
