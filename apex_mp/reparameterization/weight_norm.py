"""Weight norm: a weight is computed from its norm and its direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from apex_mp.core.log import logger, see
from apex_mp.reparameterization.reparameterization import Reparameterization

_logger = logger("apex_mp.reparameterization")
_LOW = (torch.float16, torch.bfloat16)
_WHOLE = -1  # What torch's functions mean by that.


class WeightNorm(Reparameterization):
    """Computes `weight = g * v / |v|` from the parameters `weight_g` and `weight_v`.

    Salimans and Kingma, "Weight Normalization", https://arxiv.org/abs/1602.07868.

    `weight_v` has the weight's shape. `weight_g` has one number for each index of the weight's
    dimension `dim`, in as many dimensions as the weight; with `dim=None` it is one number. Both
    have the weight's dtype; norms in float16 and bfloat16 are taken in float32.

    Args:
        name: As for `Reparameterization`.
        dim: The dimension over which no norm is taken; may be negative. None: one norm of the whole
            weight.
        module: As for `Reparameterization`.
        retain_forward: As for `Reparameterization`.
    """

    def compute_weight(self, module: nn.Module | None = None, name: str | None = None) -> Tensor:
        """Return the weight, in the dtype of its parameters."""
        module = self.module if module is None else module
        name = self.name if name is None else name
        owner, local = Reparameterization.get_module_and_name(module, name)
        v, g = getattr(owner, f"{local}_v"), getattr(owner, f"{local}_g")
        dim = _torch_dim(self.dim, v)
        if v.dtype in _LOW and dim not in (0, v.dim() - 1):
            # For the first and the last dimension torch has kernels that compute in float32.
            return torch._weight_norm(v.float(), g.float(), dim).to(v.dtype)
        return torch._weight_norm(v, g, dim)

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[list[str], list[Parameter]]:
        """Return `name_g`, the norms, and `name_v`, a copy of the weight.

        Raises:
            ValueError: The weight has no dimension `dim`.
        """
        known = range(-weight.dim(), weight.dim())
        if dim is not None and (not isinstance(dim, int) or dim not in known):
            raise ValueError(
                f"weight norm of {name}: dim is {dim!r}; for the shape {[*weight.shape]} it must "
                f"be between {-weight.dim()} and {weight.dim() - 1}, or None"
            )
        v = weight.detach()
        g = torch.norm_except_dim(v, 2, _torch_dim(dim, v))
        self._warn_of_norms(name, g)
        return [f"{name}_g", f"{name}_v"], [Parameter(g), Parameter(v.clone())]

    def _warn_of_norms(self, name: str, g: Tensor) -> None:
        """Warn that 0 / 0 and inf / inf give NaN, unless values are loaded later."""
        if g.is_meta:
            return
        unusable = int(((g == 0) | ~g.isfinite()).sum())
        if unusable:
            _logger.warning(
                "weight norm of %s in %s: %d of %d norms are zero or not finite; there the weight "
                "is NaN until other values are loaded%s",
                name,
                type(self.module).__name__,
                unusable,
                g.numel(),
                see("weight-norm"),
            )


def _torch_dim(dim: int | None, weight: Tensor) -> int:
    return _WHOLE if dim is None else dim % weight.dim()
