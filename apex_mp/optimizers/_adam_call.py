"""One call of the Adam operator: which tensors it steps, and with which numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from apex_mp import _ops
from apex_mp import grads as _grads


@dataclasses.dataclass
class AdamCall:
    """One operator call: tensors of a group on one device, all with a copy or all without."""

    device: torch.device
    has_copies: bool
    params: list[Tensor] = dataclasses.field(default_factory=list)
    grads: list[Tensor] = dataclasses.field(default_factory=list)
    exp_avgs: list[Tensor] = dataclasses.field(default_factory=list)
    exp_avg_sqs: list[Tensor] = dataclasses.field(default_factory=list)
    steps: list[Tensor] = dataclasses.field(default_factory=list)
    copies: list[Tensor] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Raise what `run` would raise, without stepping."""
        self.run(found_inf=torch.ones(1, dtype=torch.float32, device=self.device))

    def run(self, found_inf: Tensor | None) -> None:
        """Step, unless `found_inf` is set: then the operator only checks its arguments."""
        _ops.adam_(
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            self.copies if self.has_copies else None,
            found_inf=None if found_inf is None else found_inf.to(self.device),
            **self.options,
        )


def options(
    group: dict[str, Any], inv_scale: float | Tensor, device: torch.device
) -> dict[str, Any]:
    """Return the numbers of a call: the group's options and the factor on its gradients."""
    beta1, beta2 = group["betas"]
    return {
        "lr": _number_on("lr", group["lr"], device),
        "inv_scale": _number_on("scale", inv_scale, device),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "adam_w_mode": bool(group["adam_w_mode"]),
        "bias_correction": bool(group["bias_correction"]),
        "eps_inside_sqrt": bool(group["eps_inside_sqrt"]),
    }


def inverse(
    scale: float | Tensor, norm: float | Tensor | None, group: dict[str, Any], calls: list[AdamCall]
) -> float | Tensor:
    """Return 1 / (scale * clip); clip = max(1, (norm / scale + 1e-6) / max_grad_norm), as in apex.

    It is negative if the group maximises. A norm that is None but needed is computed.
    """
    sign = -1.0 if group["maximize"] else 1.0
    scale = _wide(scale)
    max_norm = group["max_grad_norm"]
    if max_norm <= 0 or not calls:
        return sign / scale
    if norm is None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for call in calls:
            by_device.setdefault(call.device, []).extend(call.grads)
        norm = _grads.norm([*by_device.values()])
    excess = (_wide(norm) / scale + 1e-6) / max_norm
    clip = excess.clamp(min=1.0) if isinstance(excess, Tensor) else max(1.0, excess)
    return sign / (scale * clip)


def _number_on(name: str, value: float | Tensor, device: torch.device) -> Tensor:
    """A number as the operators take it: a tensor on the CPU, or on the device of the call."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if value.numel() != 1:
        raise ValueError(
            f"FusedAdam: {name} is a tensor of {value.numel()} elements; it must have 1"
        )
    value = value if value.dtype in (torch.float32, torch.float64) else value.double()
    return value if value.device.type == "cpu" else value.to(device)


def _wide(value: float | Tensor) -> float | Tensor:
    # Without dimensions a CPU number may meet one on a GPU.
    return value.double().squeeze() if isinstance(value, Tensor) else float(value)
