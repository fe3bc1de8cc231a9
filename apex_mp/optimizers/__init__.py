"""Fused optimizers, and FP16_Optimizer with the defaults it had beside them."""

from apex_mp._missing import LAMB, NOVOGRAD, stand_in
from apex_mp.optimizers.fp16_optimizer import FP16_Optimizer
from apex_mp.optimizers.fused_adam import FusedAdam
from apex_mp.optimizers.fused_sgd import FusedSGD

# Old scripts import them and may not use them.
FusedLAMB = stand_in(__name__, "FusedLAMB", LAMB)
FusedNovoGrad = stand_in(__name__, "FusedNovoGrad", NOVOGRAD)

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedSGD"]
