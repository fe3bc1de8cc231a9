"""Layer norm and RMS norm under apex's names, computed by torch's, which are fused today."""

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
