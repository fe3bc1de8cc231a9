"""FP16_Optimizer as one writes it with torch alone: the peer that apex_mp has to beat.

It does the same work as ours, each piece by the best that torch has, with torch's fused AdamW:
per tensor like the Python code of 2018, or by torch's foreach functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.step_arena import (
    MAX_NORM,
    OPTIONS,
    SCALE,
    Arena,
    Running,
    count_on_param,
    give_grads,
    parameters,
)


class Masters:
    """fp32 masters of a low-precision model, with gradients that stay allocated, and AdamW."""

    def __init__(self, arena: Arena, model: list[Tensor], masters: list[Tensor]) -> None:
        self.model = parameters(model)
        self.masters = parameters(masters)
        for master, grad in zip(self.masters, arena.grads, strict=True):
            master.grad = grad
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **OPTIONS)
        arena.share_moments(self.optimizer, step=count_on_param)


class PerTensor(Masters):
    """The step of 2018, tensor by tensor; the host waits for each check."""

    def __init__(self, arena: Arena, max_norm: float) -> None:
        super().__init__(arena, arena.half, arena.weights)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self) -> None:
        if any(not math.isfinite(float(_grad(param).float().sum())) for param in self.model):
            return
        for param, master in zip(self.model, self.masters, strict=True):
            _grad(master).copy_(_grad(param))
            _grad(master).mul_(1.0 / SCALE)
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm, foreach=False)
        self.optimizer.step()
        for param, master in zip(self.model, self.masters, strict=True):
            param.copy_(master)


class Foreach(Masters):
    """The step by lists; the host waits once."""

    def __init__(self, arena: Arena, max_norm: float) -> None:
        super().__init__(arena, arena.half, arena.weights)
        self.max_norm = max_norm
        self.found_inf = torch.zeros(1, device=arena.device)
        self.inv_scale = torch.full((1,), 1.0 / SCALE, device=arena.device)

    @torch.no_grad()
    def step(self) -> None:
        grads = [_grad(master) for master in self.masters]
        torch._foreach_copy_(grads, [_grad(param) for param in self.model])
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, self.found_inf, self.inv_scale)
        if self.found_inf.item():
            return
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_([*self.model], [*self.masters])


class BfloatForeach(Masters):
    """bfloat16 by lists: no loss scale, so nothing to check."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, arena.bfloat, arena.bfloat_masters)

    @torch.no_grad()
    def step(self) -> None:
        grads = [_grad(master) for master in self.masters]
        torch._foreach_copy_(grads, [_grad(param) for param in self.model])
        self.optimizer.step()
        torch._foreach_copy_([*self.model], [*self.masters])


def _grad(param: Parameter) -> Tensor:
    grad = param.grad
    assert grad is not None  # `prepare` came before.
    return grad


def per_tensor(arena: Arena, max_norm: float = 0.0) -> Running:
    plain = PerTensor(arena, max_norm)
    return Running(lambda: give_grads(plain.model, arena.half_grads), plain.step)


def per_tensor_clip(arena: Arena) -> Running:
    return per_tensor(arena, MAX_NORM)


def foreach(arena: Arena, max_norm: float = 0.0) -> Running:
    plain = Foreach(arena, max_norm)
    return Running(lambda: give_grads(plain.model, arena.half_grads), plain.step)


def foreach_clip(arena: Arena) -> Running:
    return foreach(arena, MAX_NORM)


def bfloat_foreach(arena: Arena) -> Running:
    plain = BfloatForeach(arena)
    return Running(lambda: give_grads(plain.model, arena.bfloat_grads), plain.step)
