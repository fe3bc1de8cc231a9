"""FusedAdamW: FusedAdam under the name, and with the arguments, of torch.optim.AdamW."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from apex_mp.optimizers.fused_adam import FusedAdam


class FusedAdamW(FusedAdam):
    """`torch.optim.AdamW` (Loshchilov & Hutter 2019) in one fused pass, with masters if asked for.

        optimizer = FusedAdamW(model.parameters(), lr=1e-3, master_weights=True)

    Arguments and defaults are torch's, and so are the names in `state_dict`; results are equal
    within rounding. `FusedAdam`, which has apex's arguments, does not decay weights by default.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-3].
        betas: Decay of the first and second moment, each in [0, 1) [(0.9, 0.999)].
        eps: Added to the denominator, not negative [1e-8].
        weight_decay: Decay factor of the weights themselves, not negative [1e-2].
        amsgrad: Not supported; there for its place in the signature [False].
        maximize: Maximise the objective instead of minimising it [False].
        foreach: No effect: there is one way to step [None].
        capturable: No effect: a step can be captured in a CUDA graph anyway [False].
        differentiable: Not supported [False].
        fused: No effect [None].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        master_weights: Step a float32 master of each float16 and bfloat16 parameter; True or
            "split" keeps 2 bytes of it beside the parameter, "float32" all 4 [False].
        moment_dtype: `torch.bfloat16` keeps both moments in 2 bytes instead of 4; set
            `stochastic_rounding` too, or the second one sticks. `torch.int8` keeps them in 1
            byte, with an exponent for each 32 [torch.float32].
        stochastic_rounding: Round moments up or down at random, right on average and the same
            in each run [None: with moments in 1 byte].
        unscale_grads: Whether a step in torch's GradScaler unscales `.grad` in place; None: all
            but float16 gradients [None].
        offload: Keep masters and moments in host memory and step on the CPU; "gradients" moves
            gradients there during backward, too [False].

    Raises:
        MemoryError: `offload` is set, and the state takes more than the container's limit leaves.
        RuntimeError: `amsgrad` or `differentiable` is asked for.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range.
    """

    _public_name = "FusedAdamW"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float = 0.0,
        master_weights: bool | Literal["split", "float32"] = False,
        moment_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool | None = None,
        unscale_grads: bool | None = None,
        offload: bool | Literal["gradients"] = False,
    ) -> None:
        if differentiable:
            raise RuntimeError(
                "FusedAdamW: differentiable is True; it must be False, since no gradient passes "
                "through a fused step"
            )
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            amsgrad=amsgrad,
            master_weights=master_weights,
            moment_dtype=moment_dtype,
            stochastic_rounding=stochastic_rounding,
            maximize=maximize,
            unscale_grads=unscale_grads,
            offload=offload,
        )
