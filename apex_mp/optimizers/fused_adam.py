"""FusedAdam: Adam and AdamW, one call for all tensors on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from apex_mp.masters.layout import Rule, StateLayout
from apex_mp.optimizers._fused import FusedOptimizer


class FusedAdam(FusedOptimizer):
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019), one fused pass over all tensors.

        optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01, master_weights=True)

    Equals `torch.optim.AdamW` (`adam_w_mode=True`) and `torch.optim.Adam` (False) within rounding,
    and its `state_dict` can be loaded by them and the other way round. Parameters may be float16,
    bfloat16, float32 or float64 on CPU or CUDA, also on several devices; gradients of any of these
    dtypes. Moments and math are float32, for float64 parameters float64. Inside
    `torch.amp.GradScaler` the unscaling is part of the same pass, and float16 gradients are
    allowed unless `scaler.unscale_` is called; `apex_mp.amp.GradScaler` allows them there too.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-3].
        bias_correction: Correct the moments' start at zero [True].
        betas: Decay of the first and second moment, each in [0, 1) [(0.9, 0.999)].
        eps: Added to the denominator, not negative [1e-8].
        eps_inside_sqrt: Add eps under the square root instead of outside [False].
        weight_decay: Decay factor, not negative [0].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        amsgrad: Not supported; there for its place in the signature [False].
        adam_w_mode: Decay the weights themselves (AdamW) instead of adding L2 to the gradient
            [True].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [False].
        capturable: No effect: a step can be captured in a CUDA graph anyway, after one outside of
            the capture, if all parameters are on one device; see `refresh_hyperparameters` [False].
        master_weights: Step a float32 master of each float16 and bfloat16 parameter, and write the
            parameter in the same pass; `master(p)` returns it. Kept is the remainder, the part that
            the parameter does not hold, in 2 bytes. With bfloat16 it is equal to a float32 master
            to the bit; with float16 it is so from 2**-16 to 65504 and within 2**-41 below, and
            larger masters become inf. If two bfloat16 are equally near to a master, the parameter
            is the larger one. "float32": keep whole masters, in 4 bytes. "split" is another name of
            True. Weights that are written between steps count [False].
        moment_dtype: `torch.bfloat16`: keep both moments in 2 bytes instead of 4, rounded to
            nearest in each step. The second moment is then stuck where a step would change it by
            less than 2**-9 of itself, for example where it should fall with betas[1] = 0.999; so
            set `stochastic_rounding` too. `torch.int8`: keep them in 1 byte, as small floats in
            blocks of 32 with one exponent (csrc/math/codes.h); parameters of fewer than 4,096
            elements keep float32 [torch.float32].
        stochastic_rounding: Round moments up or down at random, so that they are right on average.
            The random numbers depend only on the parameter's place in the optimizer, its count of
            steps and the element: runs can be repeated, and CPU and CUDA round alike. Needs
            moments in bfloat16 or one byte [None: with one byte].
        maximize: Maximise the objective instead of minimising it [False].
        unscale_grads: Inside `torch.amp.GradScaler`, whether a step that is not skipped unscales
            `.grad` in place, as torch's fused optimizers do. None unscales all but float16
            gradients, in which small numbers would underflow [None].
        offload: Keep masters and moments in host memory and step on the CPU. Weights and gradients
            stay on the GPU, where parameters must be. Results and `state_dict` are as without
            offload. The host waits for the gradients; a CUDA graph cannot capture the step.
            "gradients": also move each gradient to host memory once backward has accumulated it;
            `.grad` is then a placeholder, NaN of stride 0. Use `apex_mp.amp.GradScaler` or no
            scaler; torch's is refused [False].

    Raises:
        MemoryError: `offload` is set, and the state takes more than the container's limit leaves.
        RuntimeError: `amsgrad` is asked for.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; a
            hyperparameter is no number; or `offload` is set for a DTensor.
        ValueError: A hyperparameter is out of range, or `offload` is set and a parameter is not on
            a GPU.
    """

    _public_name = "FusedAdam"
    _in_torch = torch.optim.AdamW
    _rule = Rule(
        "adam", StateLayout("an Adam", tensors=("exp_avg", "exp_avg_sq"), numbers=("step",))
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        set_grad_none: bool = False,
        capturable: bool = False,
        master_weights: bool | Literal["split", "float32"] = False,
        moment_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool | None = None,
        maximize: bool = False,
        unscale_grads: bool | None = None,
        offload: bool | Literal["gradients"] = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "adam_w_mode": adam_w_mode,
            "eps_inside_sqrt": eps_inside_sqrt,
            "master_weights": master_weights,
        }
        # Only then: without it groups have the keys of apex and torch.
        if moment_dtype != torch.float32:
            defaults["moment_dtype"] = moment_dtype
        if stochastic_rounding is None:
            stochastic_rounding = moment_dtype == torch.int8
        if stochastic_rounding:
            defaults["stochastic_rounding"] = True
        super().__init__(params, defaults, unscale_grads, master_weights, offload)

    @property
    def eps_mode(self) -> int:
        """0 if eps is added inside the square root, else 1; apex's name."""
        return 0 if self.defaults["eps_inside_sqrt"] else 1

    def _add_names_of_others(self, group: dict[str, Any]) -> None:
        group["decoupled_weight_decay"] = group["adam_w_mode"]
        if "moment_dtype" in group:  # torch.distributed.checkpoint takes no dtype.
            group["moment_dtype"] = f"{group['moment_dtype']}".removeprefix("torch.")

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        """Read torch.optim.Adam's names too."""
        super()._adapt_group(number, group, states)
        if "decoupled_weight_decay" in group:
            group["adam_w_mode"] = group.pop("decoupled_weight_decay")

    def _check_options(self, group: Mapping[str, Any]) -> None:
        if isinstance(group["bias_correction"], (tuple, list)):
            raise TypeError(
                f"FusedAdam: bias_correction is {group['bias_correction']}; it must be True or "
                "False. Betas are given as betas="
            )
        super()._check_options(group)
