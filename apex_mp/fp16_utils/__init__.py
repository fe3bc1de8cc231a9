"""Mixed precision by hand: FP16_Optimizer around any optimizer, and loss scalers."""

from apex_mp.fp16_utils.fp16_optimizer import FP16_Optimizer
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler"]
