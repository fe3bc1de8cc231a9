"""LARC (You, Gitman and Ginsburg 2017): a learning rate for each tensor, around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LARC:
    """Scale each gradient so that the step has a fixed ratio to its parameter's norm.

    The local rate is `trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`. Weight decay is
    added here, and kept from the optimizer inside for the time of the step.

    Args:
        optimizer: The optimizer whose groups and step are used.
        trust_coefficient: Ratio of step and parameter [0.02].
        clip: Let the group's learning rate be the upper bound (LARC) instead of a factor (LARS)
            [True].
        eps: Added to the denominator [1e-8].
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # pickle and copy ask before there is one
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients in place and step; return what the optimizer inside returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        with torch.no_grad():
            for group, decay in zip(self.param_groups, decays, strict=True):
                self._scale_grads(group, decay)
        try:
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            value = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return value if loss is None else loss

    def _scale_grads(self, group: dict[str, Any], weight_decay: float) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            param_norm, grad_norm = param.norm(), param.grad.norm()
            rate = (
                self.trust_coefficient
                * param_norm
                / (grad_norm + weight_decay * param_norm + self.eps)
            )
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            known = (param_norm != 0) & (grad_norm != 0)
            scaled = (param.grad + weight_decay * param) * rate
            param.grad.copy_(torch.where(known, scaled, param.grad))
