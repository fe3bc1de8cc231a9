"""Fused optimizers, and FP16_Optimizer with the defaults of apex.optimizers."""

from apex_mp.optimizers.fp16_optimizer import FP16_Optimizer
from apex_mp.optimizers.fused_adagrad import FusedAdagrad
from apex_mp.optimizers.fused_adam import FusedAdam
from apex_mp.optimizers.fused_adamw import FusedAdamW
from apex_mp.optimizers.fused_lamb import FusedLAMB
from apex_mp.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from apex_mp.optimizers.fused_novograd import FusedNovoGrad
from apex_mp.optimizers.fused_sgd import FusedSGD
from apex_mp.optimizers.master_weights import MasterWeights

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
    "MasterWeights",
]
