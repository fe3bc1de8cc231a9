"""The cases of benchmarks.step that need nothing but apex_mp and torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp import amp
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FP16_Optimizer, FusedAdam, MasterWeights
from apex_mp.step import step_log
from benchmarks import step_device, step_plain
from benchmarks.step_arena import (
    MAX_NORM,
    OPTIONS,
    SCALE,
    Arena,
    Case,
    Pass,
    Running,
    count_on_host,
    count_on_param,
    give_grads,
    parameters,
)

ADAM = Pass("Adam", 16, 12, "step_kernel")
ADAM_WRITING = Pass("Adam, writes gradients", 16, 16, "step_kernel")
ADAM_WITH_COPY = Pass("Adam with copy", 14, 14, "step_kernel")
WITH_MASTERS = Pass("Adam, float32 masters", 16, 14, "step_kernel")
SPLIT = Pass("Adam, split masters", 14, 12, "step_kernel")
SPLIT_NARROW = Pass("Adam, split masters, bfloat16 moments", 10, 8, "step_kernel")
# An exponent of one byte for 32 numbers of each moment is left out.
SPLIT_BYTES = Pass("Adam, split masters, one-byte moments", 8, 6, "step_kernel")
CHECK_AND_NORM = Pass("check with norm", 2, 0, "chunks_kernel")
SCALER_CHECK = Pass("GradScaler's check", 4, 4)  # it writes what it multiplied by 1
CHECK = Pass("check with norm, fp32", 4, 0)
NORM = Pass("norm", 4, 0)
UNSCALE = Pass("unscale", 4, 4)
CLIP = Pass("clip", 4, 4)
COPY_IN = Pass("gradients to fp32", 2, 4)
COPY_OUT = Pass("masters to the model", 4, 2)
JOIN = Pass("masters from their parts", 4, 4)
PARTS = Pass("masters to their parts", 4, 4)
SUM_CHECK = Pass("check by .float().sum()", 6, 4)


def ours_fp16(arena: Arena, max_grad_norm: float = 0.0) -> Running:
    """FP16_Optimizer around FusedAdam."""
    params = parameters(arena.half)
    inner = FusedAdam(params, max_grad_norm=max_grad_norm, **OPTIONS)
    scale = {"init_scale": SCALE, "scale_window": 2**30}
    optimizer = FP16_Optimizer(
        inner, dynamic_loss_scale=True, dynamic_loss_args=scale, verbose=False
    )
    assert optimizer.loss_scale == SCALE  # So gradients that come in are taken for scaled ones.
    optimizer._weights.mute()  # Cases take turns on the same weights.
    arena.share_moments(inner, step=count_on_param)
    return Running(lambda: give_grads(params, arena.half_grads), optimizer.step)


def ours_fp16_clip(arena: Arena) -> Running:
    """The same with clipping."""
    return ours_fp16(arena, MAX_NORM)


def ours_bf16(arena: Arena) -> Running:
    """FusedAdam on bfloat16 parameters, with masters of its own."""
    params = parameters(arena.bfloat)
    optimizer = FusedAdam(params, master_weights="float32", **OPTIONS)
    arena.share_moments(optimizer, step=count_on_param)
    for param, master in zip(params, arena.bfloat_masters, strict=True):
        optimizer._own_masters.kept[param] = master
    return Running(lambda: give_grads(params, arena.bfloat_grads), optimizer.step)


def split(arena: Arena, half: list[Tensor], **options: Any) -> tuple[list[Tensor], FusedAdam]:
    """FusedAdam with split masters, which notices if others write its weights."""
    params = parameters(arena.not_shared(half))
    optimizer = FusedAdam(params, master_weights="split", **options, **OPTIONS)
    dtype = options.get("moment_dtype", torch.float32)
    arena.share_moments(optimizer, dtype=dtype, step=count_on_param)
    for param in params:
        optimizer._own_masters.kept[param] = torch.zeros_like(param, dtype=torch.int16)
    return params, optimizer


def split_bf16(arena: Arena, **options: Any) -> Running:
    """On bfloat16 parameters."""
    params, optimizer = split(arena, arena.bfloat, **options)
    return Running(lambda: give_grads(params, arena.bfloat_grads), optimizer.step)


def split_fp16(arena: Arena, **options: Any) -> Running:
    """On float16 parameters in a GradScaler of apex_mp, whose check is the first pass."""
    params, optimizer = split(arena, arena.half, **options)
    scaler = grad_scaler(arena.device, amp.GradScaler)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    prepare = with_loss(lambda: give_grads(params, arena.half_grads), scaler, arena.device)
    return Running(prepare, step)


def around_torch(arena: Arena, master_weights: Any = "float32", **options: Any) -> Running:
    """MasterWeights around AdamW of torch, on bfloat16 parameters."""
    params = parameters(arena.not_shared(arena.bfloat))
    options = {**OPTIONS, **options}
    optimizer = MasterWeights(params, torch.optim.AdamW, master_weights=master_weights, **options)
    arena.share_moments(optimizer, step=count_on_host if options.get("foreach") else count_on_param)
    return Running(lambda: give_grads(params, arena.bfloat_grads), optimizer.step)


def fp32(arena: Arena, kind: Any, scale: float = 1.0, **options: Any) -> tuple[Running, Any]:
    """A fused optimizer, or one of torch, on fp32 parameters; and the optimizer itself."""
    params = parameters(arena.weights)
    optimizer = kind(params, **OPTIONS, **options)
    arena.share_moments(optimizer, step=count_on_host if options.get("foreach") else count_on_param)

    def prepare() -> None:
        arena.fill_grads(scale)
        give_grads(params, arena.grads)

    return Running(prepare, optimizer.step), optimizer


def ours_fp32(arena: Arena) -> Running:
    """FusedAdam."""
    return fp32(arena, FusedAdam)[0]


def torch_fused(arena: Arena) -> Running:
    """AdamW of torch in one kernel."""
    return fp32(arena, torch.optim.AdamW, fused=True)[0]


def torch_foreach(arena: Arena) -> Running:
    """AdamW of torch, a kernel for each operation."""
    return fp32(arena, torch.optim.AdamW, foreach=True)[0]


def scaled(
    arena: Arena,
    kind: Any,
    scaler_of: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    **options: Any,
) -> Running:
    """GradScaler around an optimizer, which unscales inside its step."""
    running, optimizer = fp32(arena, kind, SCALE, **options)
    scaler = grad_scaler(arena.device, scaler_of)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Running(with_loss(running.prepare, scaler, arena.device), step)


def with_loss(prepare: Callable[[], None], scaler: Any, device: str) -> Callable[[], None]:
    """Return what also scales a loss, without which our GradScaler warns."""
    loss = torch.zeros((), device=device)

    def both() -> None:
        prepare()
        scaler.scale(loss)

    return both


def grad_scaler(device: str, kind: Any = torch.amp.GradScaler) -> Any:
    """A GradScaler whose scale is SCALE and stays it."""
    scaler = kind(device, init_scale=SCALE, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))  # makes its tensors
    return scaler


def ours_scaled(arena: Arena) -> Running:
    """FusedAdam in a GradScaler."""
    return scaled(arena, FusedAdam)


def ours_scaled_reading(arena: Arena) -> Running:
    """FusedAdam in a GradScaler; it leaves gradients scaled."""
    return scaled(arena, FusedAdam, unscale_grads=False)


def ours_scaled_clip(arena: Arena) -> Running:
    """FusedAdam in a GradScaler; it clips by itself."""
    return scaled(arena, FusedAdam, max_grad_norm=MAX_NORM)


def torch_scaled(arena: Arena) -> Running:
    """Fused AdamW of torch in a GradScaler."""
    return scaled(arena, torch.optim.AdamW, fused=True)


def torch_scaled_clip(arena: Arena) -> Running:
    """The recipe of torch's documentation: unscale_, clip_grad_norm_, step."""
    return unscaled_clip(arena, torch.optim.AdamW, fused=True)


def unscaled_clip(
    arena: Arena,
    kind: Any,
    scaler_of: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    **options: Any,
) -> Running:
    """Three passes, and the step."""
    running, optimizer = fp32(arena, kind, SCALE, **options)
    scaler = grad_scaler(arena.device, scaler_of)
    (group,) = optimizer.param_groups

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(group["params"], MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return Running(with_loss(running.prepare, scaler, arena.device), step)


def our_scaler(arena: Arena) -> Running:
    """FusedAdam in a GradScaler of apex_mp."""
    return scaled(arena, FusedAdam, amp.GradScaler)


def our_scaler_clip(arena: Arena, kind: Any = FusedAdam, **options: Any) -> Running:
    """The same with clipping by the scaler, which only reads."""
    running, optimizer = fp32(arena, kind, SCALE, **options)
    scaler = grad_scaler(arena.device, amp.GradScaler)

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return Running(with_loss(running.prepare, scaler, arena.device), step)


def our_scaler_unscale_clip(arena: Arena) -> Running:
    """FusedAdam by the recipe of torch's documentation, in a GradScaler of apex_mp."""
    return unscaled_clip(arena, FusedAdam, amp.GradScaler)


def our_scaler_clip_monitor(arena: Arena) -> Running:
    """FusedAdam in a GradScaler of apex_mp, which clips, and a monitor that hears of each step."""
    running, optimizer = fp32(arena, FusedAdam, SCALE)
    scaler = grad_scaler(arena.device, amp.GradScaler)
    monitor = Monitor(length=100)

    def prepare() -> None:
        running.prepare()
        step_log.listen(scaler, monitor)

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        step_log.unlisten(monitor)  # Other cases have none.

    return Running(with_loss(prepare, scaler, arena.device), step)


def our_scaler_clip_torch(arena: Arena) -> Running:
    """Fused AdamW of torch in a GradScaler of apex_mp, which clips."""
    return our_scaler_clip(arena, torch.optim.AdamW, fused=True)


def replayed(running: Running, at: Tensor) -> Running:
    """Return a step as a CUDA graph replays it, always with the same gradients."""
    for _ in range(2):
        running.prepare()
        running.step()
    running.prepare()
    return Running(lambda: None, step_device.captured(running.step, at))


def ours_fp16_replayed(arena: Arena) -> Running:
    return replayed(ours_fp16(arena), arena.weights[0])


def ours_bf16_replayed(arena: Arena) -> Running:
    return replayed(ours_bf16(arena), arena.weights[0])


def ours_fp32_replayed(arena: Arena) -> Running:
    return replayed(ours_fp32(arena), arena.weights[0])


def torch_fused_replayed(arena: Arena) -> Running:
    """AdamW of torch, made for graphs."""
    running, _ = fp32(arena, torch.optim.AdamW, fused=True, capturable=True)
    return replayed(running, arena.weights[0])


FP16, FP16_CLIP, BF16 = "ours fp16", "ours fp16, clip", "ours bf16"
FP32, SCALED, SCALED_CLIP = "ours fp32", "ours fp32, GradScaler", "ours fp32, GradScaler, clip"
SCALED_READING = "ours fp32, GradScaler, only reads"
OUR_SCALER = (
    "ours fp32, our GradScaler",
    "ours fp32, our GradScaler, clip",
    "our GradScaler + clip + torch fused",
    "ours fp32, our GradScaler, unscale_, clip",
    "ours fp32, our GradScaler, clip, monitor",
)
NARROW: dict[str, Any] = {"moment_dtype": torch.bfloat16}
STOCHASTIC: dict[str, Any] = {**NARROW, "stochastic_rounding": True}
BYTES: dict[str, Any] = {"moment_dtype": torch.int8}
CPU = ("cpu",)
GPU = ("cuda",)
PLAIN = (COPY_IN, UNSCALE, ADAM, COPY_OUT)
PLAIN_CLIP = (COPY_IN, UNSCALE, NORM, CLIP, ADAM, COPY_OUT)

CASES = (
    Case(FP16, FP16, (CHECK_AND_NORM, ADAM_WITH_COPY), ours_fp16),
    Case("plain torch fp16, foreach", FP16, PLAIN, step_plain.foreach),
    Case("plain torch fp16, per tensor", FP16, (SUM_CHECK, *PLAIN), step_plain.per_tensor),
    Case(FP16_CLIP, FP16_CLIP, (CHECK_AND_NORM, ADAM_WITH_COPY), ours_fp16_clip),
    Case("plain torch fp16, foreach, clip", FP16_CLIP, PLAIN_CLIP, step_plain.foreach_clip),
    Case("plain torch fp16, per tensor, clip", FP16_CLIP, (SUM_CHECK, *PLAIN_CLIP),
         step_plain.per_tensor_clip),
    Case(BF16, BF16, (WITH_MASTERS,), ours_bf16),
    Case("plain torch bf16, foreach", BF16, (COPY_IN, ADAM, COPY_OUT), step_plain.bfloat_foreach),
    Case(SCALED, SCALED, (SCALER_CHECK, ADAM_WRITING), ours_scaled),
    Case(SCALED_READING, SCALED, (SCALER_CHECK, ADAM), ours_scaled_reading),
    Case("GradScaler + torch fused", SCALED, (SCALER_CHECK, ADAM_WRITING), torch_scaled),
    Case(SCALED_CLIP, SCALED_CLIP, (SCALER_CHECK, NORM, ADAM_WRITING), ours_scaled_clip),
    Case("GradScaler + clip + torch fused", SCALED_CLIP, (UNSCALE, NORM, CLIP, ADAM),
         torch_scaled_clip),
    Case(OUR_SCALER[0], SCALED, (CHECK, ADAM_WRITING), our_scaler),
    Case(OUR_SCALER[1], SCALED_CLIP, (CHECK, ADAM_WRITING), our_scaler_clip),
    Case(OUR_SCALER[2], SCALED_CLIP, (CHECK, ADAM_WRITING), our_scaler_clip_torch),
    Case(OUR_SCALER[3], SCALED_CLIP, (UNSCALE, NORM, CLIP, ADAM), our_scaler_unscale_clip),
    # A monitor of a GPU hears of a step at a later one.
    Case(OUR_SCALER[4], SCALED_CLIP, (CHECK, ADAM_WRITING), our_scaler_clip_monitor, CPU),
    Case(FP32, FP32, (ADAM,), ours_fp32),
    Case("torch AdamW, fused", FP32, (ADAM,), torch_fused),
    Case("torch AdamW, foreach", FP32, (ADAM,), torch_foreach),
)  # fmt: skip
# Fewer bytes, beside float32 masters of ours.
MODES = (
    Case(f"{FP16}, split", FP16, (CHECK_AND_NORM, SPLIT), split_fp16),
    Case(f"{FP16}, split, bf16 moments", FP16, (CHECK_AND_NORM, SPLIT_NARROW),
         functools.partial(split_fp16, **NARROW)),
    Case(f"{FP16}, split, bf16 moments, stochastic", FP16, (CHECK_AND_NORM, SPLIT_NARROW),
         functools.partial(split_fp16, **STOCHASTIC)),
    Case(f"{FP16}, split, one-byte moments", FP16, (CHECK_AND_NORM, SPLIT_BYTES),
         functools.partial(split_fp16, **BYTES)),
    Case(f"{BF16}, split", BF16, (SPLIT,), split_bf16),
    Case(f"{BF16}, split, bf16 moments", BF16, (SPLIT_NARROW,),
         functools.partial(split_bf16, **NARROW)),
    Case(f"{BF16}, split, bf16 moments, stochastic", BF16, (SPLIT_NARROW,),
         functools.partial(split_bf16, **STOCHASTIC)),
    Case(f"{BF16}, split, one-byte moments", BF16, (SPLIT_BYTES,),
         functools.partial(split_bf16, **BYTES)),
)  # fmt: skip
# Masters for an optimizer of another, beside those of a fused one.
AROUND = (COPY_IN, ADAM, COPY_OUT)
MASTERS = (
    Case("MasterWeights(AdamW, fused)", BF16, AROUND, functools.partial(around_torch, fused=True)),
    Case("MasterWeights(AdamW, fused), keep_grads", BF16, AROUND,
         functools.partial(around_torch, fused=True, keep_grads=True)),
    Case("MasterWeights(AdamW, foreach)", BF16, AROUND,
         functools.partial(around_torch, foreach=True)),
    Case("MasterWeights(AdamW, fused), split", BF16, (COPY_IN, JOIN, ADAM, PARTS),
         functools.partial(around_torch, master_weights="split", fused=True)),
)  # fmt: skip
MASTERS_BESIDE = (BF16, "torch AdamW, fused")
MODES_BESIDE = (FP16, BF16, "AdamW, fused", "DeepSpeed")
# They come last, because a capture that fails may leave the device unusable.
REPLAYED = (
    Case("ours fp32, replayed", FP32, (ADAM,), ours_fp32_replayed, GPU),
    Case("torch AdamW, fused, replayed", FP32, (ADAM,), torch_fused_replayed, GPU),
    Case("ours bf16, replayed", BF16, (WITH_MASTERS,), ours_bf16_replayed, GPU),
    Case("ours fp16, replayed", FP16, (CHECK_AND_NORM, ADAM_WITH_COPY), ours_fp16_replayed, GPU),
)  # fmt: skip
