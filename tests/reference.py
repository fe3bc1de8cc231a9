"""What every operator must compute, in plain PyTorch: short, slow, and obviously right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


def math_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is, else float32: what the operators compute in."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def sums_of_squares(grads: Sequence[Tensor], places: Sequence[int], before: Tensor) -> Tensor:
    """Return sums of squares at their places, and what was before elsewhere."""
    sums = before.cpu().clone()
    for grad, place in zip(grads, places, strict=True):
        sums[place] = grad.double().square().sum().cpu()
    return sums


def l2_norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5)


def exponents(tensors: Sequence[Tensor]) -> Tensor:
    """Return the counts of `ops.exponents_`, found by frexp in float64."""
    counts = torch.zeros(len(tensors), 256, dtype=torch.int64)
    for row, tensor in zip(counts, tensors, strict=True):
        numbers = tensor.detach().cpu().double().flatten()
        finite = numbers[numbers.isfinite() & (numbers != 0)]
        bins = (torch.frexp(finite).exponent + 126).clamp(1, 254)
        row += torch.bincount(bins, minlength=256)
        row[0] = (numbers == 0).sum()
        row[255] = (~numbers.isfinite()).sum()
    return counts


def unscaled(src: Tensor, inv_scale: float, like: Tensor) -> Tensor:
    """Return the exact result: one product in the math dtype, rounded once to that of `like`."""
    dtype = math_dtype(src, like)
    return (src.to(dtype) * torch.tensor(inv_scale, dtype=dtype, device=src.device)).to(like.dtype)


def axpby(x: Tensor, y: Tensor, a: float, b: float, like: Tensor) -> Tensor:
    """Return the exact result: two products and a sum, each rounded, then once to `like`."""
    dtype = math_dtype(x, y, like)
    factor_a = torch.tensor(a, dtype=dtype, device=x.device)
    factor_b = torch.tensor(b, dtype=dtype, device=x.device)
    return (factor_a * x.to(dtype) + factor_b * y.to(dtype)).to(like.dtype)


ZERO = torch.zeros((), dtype=torch.float64)


@dataclasses.dataclass
class _Stepped:
    """One parameter and its state in float64, whatever they are given in; without state, zeros."""

    param: Tensor

    def __post_init__(self) -> None:
        for name, value in [*vars(self).items()]:
            if isinstance(value, Tensor):
                setattr(self, name, value.detach().double())


@dataclasses.dataclass
class Adam(_Stepped):
    """One parameter under Adam in float64 (Kingma & Ba 2015; AdamW: Loshchilov & Hutter 2019)."""

    exp_avg: Tensor = ZERO
    exp_avg_sq: Tensor = ZERO
    step: Tensor | float = ZERO

    def update(
        self,
        grad: Tensor,
        *,
        lr: float,
        inv_scale: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        bias_correction: bool,
        eps_inside_sqrt: bool,
        maximize: bool = False,
    ) -> None:
        beta1, beta2 = betas
        self.step = self.step + 1
        grad = grad.double() * (-inv_scale if maximize else inv_scale)
        if not adam_w_mode:
            grad = grad + weight_decay * self.param
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * grad
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * grad**2
        bias_correction1 = 1 - beta1**self.step if bias_correction else 1.0
        bias_correction2 = 1 - beta2**self.step if bias_correction else 1.0
        variance = self.exp_avg_sq / bias_correction2
        denom = (variance + eps).sqrt() if eps_inside_sqrt else variance.sqrt() + eps
        if adam_w_mode:
            self.param = self.param - lr * weight_decay * self.param
        self.param = self.param - lr * (self.exp_avg / bias_correction1) / denom


@dataclasses.dataclass
class Sgd(_Stepped):
    """One parameter under SGD in float64, as torch.optim.SGD; without a buffer at the start."""

    momentum_buffer: Tensor | None = None

    def update(
        self,
        grad: Tensor,
        *,
        lr: float,
        inv_scale: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        wd_after_momentum: bool,
    ) -> None:
        update = grad.double() * inv_scale
        if not wd_after_momentum:
            update = update + weight_decay * self.param
        if momentum:
            before = self.momentum_buffer
            buffer = update if before is None else momentum * before + (1 - dampening) * update
            update = update + momentum * buffer if nesterov else buffer
            self.momentum_buffer = buffer
        if wd_after_momentum:
            update = update + weight_decay * self.param
        self.param = self.param - lr * update


@dataclasses.dataclass
class Adagrad(_Stepped):
    """One parameter under Adagrad in float64 (Duchi, Hazan & Singer 2011, diagonal form)."""

    sum: Tensor = ZERO

    def update(
        self,
        grad: Tensor,
        *,
        lr: float,
        inv_scale: float,
        eps: float,
        weight_decay: float,
        adagrad_w_mode: bool,
    ) -> None:
        grad = grad.double() * inv_scale
        if not adagrad_w_mode:
            grad = grad + weight_decay * self.param
        self.sum = self.sum + grad**2
        update = grad / (self.sum.sqrt() + eps)
        if adagrad_w_mode:
            update = update + weight_decay * self.param
        self.param = self.param - lr * update


@dataclasses.dataclass
class NovoGrad(_Stepped):
    """One parameter under NovoGrad in float64 (Ginsburg et al. 2019), with apex's options.

    `exp_avg_sq` is a norm, not its square.
    """

    exp_avg: Tensor = ZERO
    exp_avg_sq: Tensor = ZERO
    step: Tensor = ZERO

    def update(
        self,
        grad: Tensor,
        *,
        lr: float,
        inv_scale: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        reg_inside_moment: bool,
        grad_averaging: bool,
        norm_type: int,
        init_zero: bool,
    ) -> None:
        beta1, beta2 = betas
        self.step = self.step + 1
        grad = grad.double() * inv_scale
        magnitudes = torch.cat([grad.abs().flatten(), grad.new_zeros(1)])
        norm = magnitudes.max() if norm_type == 0 else magnitudes.square().sum().sqrt()
        if self.step == 1 and not init_zero:
            self.exp_avg_sq = norm
        elif norm_type == 0:
            self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * norm
        else:
            self.exp_avg_sq = (beta2 * self.exp_avg_sq**2 + (1 - beta2) * norm**2).sqrt()
        bias_correction1 = 1 - beta1 ** self.step.item() if bias_correction else 1.0
        bias_correction2 = 1 - beta2 ** self.step.item() if bias_correction else 1.0
        denom = self.exp_avg_sq / bias_correction2**0.5 + eps
        if reg_inside_moment:
            grad = grad / denom + weight_decay * self.param
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1 if grad_averaging else 1.0) * grad
        update = self.exp_avg / bias_correction1
        if not reg_inside_moment:
            update = update / denom + weight_decay * self.param
        self.param = self.param - lr * update


@dataclasses.dataclass
class LAMB(_Stepped):
    """One parameter under LAMB in float64 (You et al. 2020, algorithm 2), with apex's options."""

    exp_avg: Tensor = ZERO
    exp_avg_sq: Tensor = ZERO
    step: Tensor = ZERO

    def update(
        self,
        grad: Tensor,
        *,
        lr: float,
        inv_scale: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        adam_w_mode: bool,
        grad_averaging: bool,
        use_nvlamb: bool,
    ) -> None:
        beta1, beta2 = betas
        self.step = self.step + 1
        grad = grad.double() * inv_scale
        if not adam_w_mode:
            grad = grad + weight_decay * self.param
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1 if grad_averaging else 1.0) * grad
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * grad**2
        bias_correction1 = 1 - beta1 ** self.step.item() if bias_correction else 1.0
        bias_correction2 = 1 - beta2 ** self.step.item() if bias_correction else 1.0
        moment = self.exp_avg / bias_correction1
        update = moment / ((self.exp_avg_sq / bias_correction2).sqrt() + eps)
        if adam_w_mode:
            update = update + weight_decay * self.param
        norms = [each.square().sum().sqrt() for each in (self.param, update)]
        ratio = 1.0
        if (use_nvlamb or weight_decay != 0) and all(norms):
            ratio = (norms[0] / norms[1]).item()
        self.param = self.param - lr * ratio * update
