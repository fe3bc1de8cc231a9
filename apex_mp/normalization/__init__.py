"""FusedLayerNorm: torch's layer norm, which is fused today, by its old name."""

from apex_mp.normalization import fused_layer_norm_cuda
from apex_mp.normalization.fused_layer_norm import FusedLayerNorm

__all__ = ["FusedLayerNorm", "fused_layer_norm_cuda"]
