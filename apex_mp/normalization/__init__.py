"""Layer norm and RMS norm by their names in apex; torch's, which are fused today, compute them."""

from apex_mp.normalization import fused_layer_norm_cuda
from apex_mp.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm_cuda",
]
