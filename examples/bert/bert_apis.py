"""The APIs of mixed precision by which bert.py trains, one class for each."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.optimizers import FP16_Optimizer, FusedAdam


class Fp32:
    """Training in float32; what other precisions do otherwise is in the classes below."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.device = args.device.partition(":")[0]
        self.scale = args.loss_scale or "dynamic"
        self.optimizer: Any = build_optimizer(model, args)
        self.model = model
        self.parts: dict[str, Any] = {}  # what else has a state

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model(**inputs).logits.float()

    def backward(self, loss: Tensor) -> None:
        """Add gradients to those that are there."""
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def was_skipped(self) -> bool:
        """Whether the last step was skipped, because gradients held inf or NaN."""
        return False

    def loss_scale(self) -> float:
        return 1.0


class ByFP16Optimizer(Fp32):
    """Weights in float16, and float32 masters in the optimizer; no function is cast."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        super().__init__(model.half(), args)
        if args.loss_scale == 0:
            self.optimizer = FP16_Optimizer(
                self.optimizer, dynamic_loss_scale=True, verbose=False, model=model
            )
        else:
            self.optimizer = FP16_Optimizer(
                self.optimizer, static_loss_scale=args.loss_scale, verbose=False, model=model
            )

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

    def was_skipped(self) -> bool:
        return bool(self.optimizer.overflow)

    def loss_scale(self) -> float:
        return float(self.optimizer.loss_scale)


class ByInit(Fp32):
    """Weights in float32; `amp.init` casts in the functions of torch."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        super().__init__(model, args)
        self.handle = amp.init(loss_scale=self.scale, device_type=self.device)
        self.parts = {"amp": self.handle}

    def backward(self, loss: Tensor) -> None:
        with self.handle.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def was_skipped(self) -> bool:
        return amp.step_was_skipped(self.optimizer)

    def loss_scale(self) -> float:
        return float(self.handle.state_dict()["loss_scaler0"]["loss_scale"])


class ByInitialize(Fp32):
    """`amp.initialize`: O1 casts in functions, O2 has weights in float16 and float32 masters."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        super().__init__(model, args)
        self.model, self.optimizer = amp.initialize(
            model, self.optimizer, opt_level=args.amp, loss_scale=self.scale, verbosity=0
        )
        self.parts = {"amp": amp}

    def backward(self, loss: Tensor) -> None:
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def was_skipped(self) -> bool:
        return amp.step_was_skipped(self.optimizer)

    def loss_scale(self) -> float:
        return float(amp.state_dict()["loss_scaler0"]["loss_scale"])


class ByAutocast(Fp32):
    """Weights in float32; torch's own autocast and GradScaler, with FusedAdam."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        super().__init__(model, args)
        self.scaler = torch.amp.GradScaler(self.device, init_scale=args.loss_scale or 2.0**16)
        self.parts = {"scaler": self.scaler}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast(self.device, dtype=torch.float16):
            return super().forward(inputs)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped = self.scaler.get_scale() < before
        if self.scale != "dynamic":  # torch has no static scale.
            self.scaler.update(self.scale)

    def was_skipped(self) -> bool:
        return self.skipped

    def loss_scale(self) -> float:
        return self.scaler.get_scale()


APIS: dict[str, type[Fp32]] = {
    "none": Fp32,
    "fp16_optimizer": ByFP16Optimizer,
    "init": ByInit,
    "O1": ByInitialize,
    "O2": ByInitialize,
    "autocast": ByAutocast,
}


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> FusedAdam:
    """Return the optimizer of the scripts of 2019: no decay of biases and norms, no correction."""
    no_decay = ("bias", "LayerNorm.weight")
    named = [*model.named_parameters()]
    decayed = [p for n, p in named if not n.endswith(no_decay)]
    others = [p for n, p in named if n.endswith(no_decay)]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return FusedAdam(groups, lr=args.learning_rate, bias_correction=False, max_grad_norm=1.0)
