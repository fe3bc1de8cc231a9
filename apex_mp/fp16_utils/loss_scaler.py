"""The loss scalers of apex.fp16_utils, under the name that pickles and imports have."""

from apex_mp.scale.fp16_scalers import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
