"""FP16_Optimizer trains as fp32 training would, and its loss scale moves as GradScaler's does."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, INF, faces, parameter
from tolerances import TRAJECTORY_TOLERANCES, assert_near
from torch import Tensor

from apex_mp import optimizers
from apex_mp.optimizers import FusedAdam

SCALE = 1024.0
SHAPES = [(6, 4), (6,), (1, 6)]


def start(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [weight.bfloat16().float().to(device) for weight in weights]  # Exact in float16 too.


def batches(count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(8, 4, generator=generator).to(device) for _ in range(count)]
    return [(x, x.sum(dim=1, keepdim=True).sin()) for x in inputs]


def network_loss(weights: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    w1, b1, w2 = weights
    # Products in float32, as float16 matmuls are slow on a CPU; gradients arrive in each dtype.
    hidden = torch.tanh(torch.nn.functional.linear(x, w1.float(), b1.float()))
    return (torch.nn.functional.linear(hidden, w2.float()) - y).square().mean()


MIXES = [(F16, F16, F16), (F16, F32, F16), (BF16, F32, F16)]
mixes = pytest.mark.parametrize("dtypes", MIXES, ids=["fp16", "fp16+fp32", "bf16+fp32+fp16"])


@faces
@mixes
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam"])
def test_fused_adam_equals_torch_training_with_the_models_gradients(
    adam_w_mode: bool, dtypes: tuple[torch.dtype, ...], face: Any, device: torch.device
) -> None:
    def fused(params: Any) -> Any:
        return FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode)

    def plain(params: Any) -> Any:
        cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return cls(params, lr=0.01, weight_decay=0.1)

    # Fed with the same gradients: a weight that rounds the other way changes the next gradient by
    # an ulp of float16, so the reference gets those of the model that is trained.
    model = [parameter(w, d, device) for w, d in zip(start(device), dtypes, strict=True)]
    optimizer = face(fused(model), static_loss_scale=SCALE, verbose=False)
    masters = [torch.nn.Parameter(w) for w in start(device)]
    reference = plain(masters)
    for x, y in batches(100, device):
        copies = [p.detach().clone().requires_grad_() for p in model]
        (network_loss(copies, x, y) * SCALE).backward()
        for master, copy in zip(masters, copies, strict=True):
            assert copy.grad is not None
            master.grad = copy.grad.float() / SCALE
        reference.step()
        optimizer.zero_grad()
        optimizer.backward(network_loss(model, x, y))
        optimizer.step()
        for ours, param, wanted in zip(
            optimizer.param_groups[0]["params"], model, masters, strict=True
        ):
            assert_near(ours.detach(), wanted.detach(), TRAJECTORY_TOLERANCES[F32])
            assert torch.equal(param, ours.to(param.dtype))


# The same trajectory of scales, and the same steps skipped, as torch.amp.GradScaler.

WINDOW = 3


def walk_grad_scaler(
    overflows: Sequence[bool], init_scale: float, device: torch.device
) -> list[tuple[float, bool]]:
    """After each step: the scale, and whether the weight has moved."""
    weight = parameter([1.0, 2.0], F32, device)
    optimizer = FusedAdam([weight], lr=0.5)
    scaler = torch.amp.GradScaler(device=device.type, init_scale=init_scale, growth_interval=WINDOW)
    seen = []
    for overflow in overflows:
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight * (INF if overflow else 1e-3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), not torch.equal(weight, before)))
    return seen


def walk_fp16_optimizer(
    overflows: Sequence[bool], init_scale: float, device: torch.device, face: Any, make: Any
) -> list[tuple[float, bool]]:
    weight = parameter([1.0, 2.0], F16, device)
    optimizer = face(
        make([weight], lr=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": init_scale,
            "scale_window": WINDOW,
            "min_loss_scale": None,
        },
        verbose=False,
    )
    master = optimizer.param_groups[0]["params"][0]
    seen = []
    for overflow in overflows:
        before = master.detach().clone()
        optimizer.zero_grad()
        optimizer.backward((weight.float() * (INF if overflow else 1e-3)).sum())
        optimizer.step()
        assert optimizer.overflow == overflow
        seen.append((optimizer.loss_scale, not torch.equal(master, before)))
    return seen


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.AdamW], ids=["fused", "plain"])
def test_every_short_overflow_sequence_gives_the_scales_of_grad_scaler(
    make: Any, device: torch.device
) -> None:
    for overflows in itertools.product([False, True], repeat=7):
        expected = walk_grad_scaler(overflows, 256.0, device)
        face = optimizers.FP16_Optimizer
        assert walk_fp16_optimizer(overflows, 256.0, device, face, make) == expected, overflows
