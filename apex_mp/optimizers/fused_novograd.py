"""FusedNovoGrad: NovoGrad, one call for all tensors on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from apex_mp.masters.layout import Rule, StateLayout
from apex_mp.optimizers._fused import FusedOptimizer


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad (Ginsburg et al. 2019): Adam whose second moment is one number a tensor, a norm.

        optimizer = FusedNovoGrad(model.parameters(), lr=1e-2, betas=(0.95, 0.98))

    Does what apex's FusedNovoGrad does, and loads its `state_dict`. Parameters may be float16,
    bfloat16, float32 or float64 on CPU or CUDA, also on several devices; gradients of any of these
    dtypes. Moments and math are float32, for float64 parameters float64; the norm, kept in
    `state[p]["exp_avg_sq"]`, is float32. `torch.amp.GradScaler` and CUDA graphs as with
    `FusedAdam`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-3].
        bias_correction: Correct the moments' start at zero [True].
        betas: Decay of the gradients' moment and of the norm, each in [0, 1) [(0.9, 0.999)].
        eps: Added to the norm, not negative [1e-8].
        weight_decay: Decay factor, not negative [0].
        amsgrad: Not supported; there for its place in the signature [False].
        reg_inside_moment: Divide by the norm, and decay, before the moment is taken, as in the
            paper, instead of after it [False].
        grad_averaging: Multiply gradients by 1 - betas[0] on their way into the moment [True].
        norm_type: 2 for the l2 norm, 0 for the maximum norm [2].
        init_zero: Begin with norm 0, instead of that of the first gradient [False].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [True].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        master_weights: As of `FusedAdam` [False].
        unscale_grads: As of `FusedAdam` [None].
        offload: As of `FusedAdam` [False].

    Raises:
        MemoryError: `offload` is set, and the state takes more than the container's limit leaves.
        RuntimeError: `amsgrad` is asked for, or a norm of another type.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range.
    """

    _public_name = "FusedNovoGrad"
    _rule = Rule(
        "novograd",
        StateLayout("a NovoGrad", tensors=("exp_avg",), numbers=("step", "exp_avg_sq")),
        steps_parts=False,
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        max_grad_norm: float = 0.0,
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
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, unscale_grads, master_weights, offload)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        if group["norm_type"] not in (0, 2):
            raise RuntimeError("FusedNovoGrad only support l2/inf norm now.")
        super()._check_options(group)

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        """Read apex's groups, which hold the norms too, sorted by dtype."""
        super()._adapt_group(number, group, states)
        norms = group.pop("exp_avg_sq", None)
        params = self.param_groups[number]["params"] if number < len(self.param_groups) else []
        if norms is None or len(params) != len(group["params"]):
            return
        pairs = [*zip(group["params"], params, strict=True)]
        for dtype, saved in zip((torch.float16, torch.float32), norms, strict=True):
            stepped = [index for index, p in pairs if p.dtype == dtype and states.get(index)]
            if len(saved) != len(stepped):
                raise ValueError(
                    f"FusedNovoGrad.load_state_dict: param_groups[{number}] has {len(saved)} norms "
                    f"of parameters of {dtype}, and states of {len(stepped)}; they must match"
                )
            for index, norm in zip(stepped, saved, strict=True):
                states[index] = {"exp_avg_sq": norm, **states[index]}
