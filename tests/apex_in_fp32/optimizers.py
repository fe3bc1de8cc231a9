"""FusedAdam as its formula, and FP16_Optimizer as what is left of it without fp16."""

import torch

from .fp16_utils import FP16_Optimizer

__all__ = ["FP16_Optimizer", "FusedAdam"]


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=0.0,
    ):
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["max_grad_norm"] > 0:
                torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * self.direction(group, param)

    def direction(self, group, param):
        state, (beta1, beta2) = self.state[param], group["betas"]
        state["step"] = t = state.get("step", 0) + 1
        m, v = state.get("exp_avg", 0.0), state.get("exp_avg_sq", 0.0)
        state["exp_avg"] = m = beta1 * m + (1 - beta1) * param.grad
        state["exp_avg_sq"] = v = beta2 * v + (1 - beta2) * param.grad**2
        if group["bias_correction"]:
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        return m / (v.sqrt() + group["eps"]) + group["weight_decay"] * param
