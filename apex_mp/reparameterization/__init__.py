"""Weights computed from other parameters, such as weight norm, with the names of apex."""

from apex_mp.reparameterization.apply import (
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)
from apex_mp.reparameterization.reparameterization import Reparameterization
from apex_mp.reparameterization.weight_norm import WeightNorm

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]
