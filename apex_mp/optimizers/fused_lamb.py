"""FusedLAMB: LAMB, one call for all tensors on a device."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from apex_mp.masters.layout import Rule, StateLayout
from apex_mp.optimizers._fused import FusedOptimizer


class FusedLAMB(FusedOptimizer):
    """LAMB (You et al. 2020): Adam, with each tensor's update scaled by its parameter's norm.

        optimizer = FusedLAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_grad_norm=1.0)

    Does what apex's FusedLAMB does, and loads its `state_dict`. Parameters may be float16,
    bfloat16, float32 or float64 on CPU or CUDA, also on several devices; gradients of any of these
    dtypes. Moments and math are float32, for float64 parameters float64. `torch.amp.GradScaler` and
    CUDA graphs as with `FusedAdam`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-3].
        bias_correction: Correct the moments' start at zero [True].
        betas: Decay of the first and second moment, each in [0, 1) [(0.9, 0.999)].
        eps: Added to the denominator, not negative [1e-6].
        weight_decay: Decay factor, not negative [0.01].
        amsgrad: Not supported; there for its place in the signature [False].
        adam_w_mode: Decay the weights themselves instead of adding L2 to the gradient [True].
        grad_averaging: Multiply gradients by 1 - betas[0] on their way into the moment [True].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [True].
        max_grad_norm: Clip all gradients by their l2 norm, over all groups; 0 does not clip [1.0].
        use_nvlamb: Multiply the update by the ratio of the norms without weight decay too [False].
        master_weights: As of `FusedAdam` [False].
        unscale_grads: As of `FusedAdam` [None].
        offload: As of `FusedAdam` [False].

    Raises:
        MemoryError: `offload` is set, and the state takes more than the container's limit leaves.
        RuntimeError: `amsgrad` is asked for.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range.
    """

    _public_name = "FusedLAMB"
    _rule = Rule(
        "lamb",
        StateLayout("a LAMB", tensors=("exp_avg", "exp_avg_sq"), numbers=("step",)),
        clips_by_global_norm=True,
        steps_parts=False,
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        master_weights: bool | Literal["split", "float32"] = False,
        unscale_grads: bool | None = None,
        offload: bool | Literal["gradients"] = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, unscale_grads, master_weights, offload)
