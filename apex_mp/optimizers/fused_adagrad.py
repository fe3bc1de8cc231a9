"""FusedAdagrad: Adagrad, one call for all tensors on a device."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from apex_mp.masters.layout import Rule, StateLayout
from apex_mp.optimizers._fused import FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011), one fused pass over all tensors.

        optimizer = FusedAdagrad(model.parameters(), lr=1e-2)

    Equals `torch.optim.Adagrad` without `lr_decay` within rounding, and loads its `state_dict`;
    torch's does not load that of this optimizer, whose states count no steps.
    Parameters may be float16, bfloat16, float32 or float64 on CPU or CUDA, also on several devices;
    gradients of any of these dtypes. Sums and math are float32, for float64 parameters float64.
    `torch.amp.GradScaler` and CUDA graphs as with `FusedAdam`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-2].
        eps: Added to the denominator, not negative [1e-10].
        weight_decay: Decay factor, not negative [0].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [True].
        adagrad_w_mode: Decay the weights themselves instead of adding L2 to the gradient [False].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        master_weights: As of `FusedAdam` [False].
        unscale_grads: As of `FusedAdam` [None].
        offload: As of `FusedAdam` [False].

    Raises:
        MemoryError: `offload` is set, and the state takes more than the container's limit leaves.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range.
    """

    _public_name = "FusedAdagrad"
    _rule = Rule("adagrad", StateLayout("an Adagrad", tensors=("sum",)))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        max_grad_norm: float = 0.0,
        master_weights: bool | Literal["split", "float32"] = False,
        unscale_grads: bool | None = None,
        offload: bool | Literal["gradients"] = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "adagrad_w_mode": adagrad_w_mode,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, unscale_grads, master_weights, offload)

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        """Read torch.optim.Adagrad's states, whose step count is needed for `lr_decay` only."""
        for name in ("lr_decay", "maximize"):
            if group.get(name):
                raise ValueError(
                    f"FusedAdagrad.load_state_dict: param_groups[{number}] has {name}="
                    f"{group[name]}, which FusedAdagrad does not have"
                )
        for index in group["params"]:
            if states.get(index):
                states[index] = {k: v for k, v in states[index].items() if k != "step"}
