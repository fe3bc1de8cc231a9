"""Whole training steps of a decoder: time, memory and loss of ways to train it in low precision.

    python -m benchmarks.training               print the table; write JSON and a picture
    python -m benchmarks.training --offload     masters and moments in host memory
    python -m benchmarks.training --device cpu  small: only to see that it works

The decoder is Llama of transformers with random weights. The data are synthetic: with probability
0.9 a token is a fixed function of the previous one, otherwise it is uniform. Every way has the same
weights and tokens, clips the norm of all gradients to 1, and leaves the rotary frequencies in
float32. The optimizer's time is from the end of backward to the end of the step: unscaling,
clipping and the update.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from apex_mp import amp
from apex_mp.optimizers import FP16_Optimizer, FusedAdam
from benchmarks import step_machine
from benchmarks.amp import environment
from benchmarks.gpu_build import commit
from benchmarks.offload import stand_in
from benchmarks.step_device import DEVICES, Cpu
from benchmarks.step_report import markdown

RESULTS = Path(__file__).resolve().parent / "results"
F16, BF16 = torch.float16, torch.bfloat16
LR, CLIP, LAST = 3e-4, 1.0, 5
NARROW: dict[str, Any] = {"master_weights": "split", "moment_dtype": BF16}


class Size(NamedTuple):
    """What is trained, and for how long."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    warm_up: int
    steps: int


SIZES = {
    "cuda": Size(2048, 16, 16, 32_000, 4, 1024, 5, 35),
    "cpu": Size(64, 2, 4, 256, 4, 32, 1, 6),
}


class Way(NamedTuple):
    """How a step is taken, after the loss was computed."""

    backward: Callable[[Tensor], None]
    step: Callable[[], object]
    optimizer: Any
    autocast_dtype: torch.dtype | None = None
    close: Callable[[], None] = lambda: None


def with_torch_scaler(model: nn.Module, device: str) -> Way:
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW(params, LR, fused=True)
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, CLIP)
        scaler.step(optimizer)
        scaler.update()

    return Way(lambda loss: scaler.scale(loss).backward(), step, optimizer, F16)


def with_torch(model: nn.Module, casts: torch.dtype | None) -> Way:
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW(params, LR, fused=True)

    def step() -> None:
        clip_grad_norm_(params, CLIP)
        optimizer.step()

    return Way(lambda loss: loss.backward(), step, optimizer, casts)


def with_our_scaler(
    model: nn.Module, device: str, casts: torch.dtype | None = None, **options: Any
) -> Way:
    optimizer = FusedAdam(model.parameters(), LR, weight_decay=0.01, **options)
    scaler = amp.GradScaler(device, model=model)

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, CLIP)
        scaler.step(optimizer)
        scaler.update()

    return Way(lambda loss: scaler.scale(loss).backward(), step, optimizer, casts)


def with_fused_adam(model: nn.Module, **options: Any) -> Way:
    optimizer = FusedAdam(model.parameters(), LR, weight_decay=0.01, max_grad_norm=CLIP, **options)
    return Way(lambda loss: loss.backward(), optimizer.step, optimizer)


def with_fp16_optimizer(model: nn.Module) -> Way:
    inner = FusedAdam(model.parameters(), LR, weight_decay=0.01, max_grad_norm=CLIP)
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    return Way(optimizer.backward, optimizer.step, optimizer)


def with_handle(model: nn.Module, device: str) -> Way:
    optimizer = FusedAdam(model.parameters(), LR, weight_decay=0.01, max_grad_norm=CLIP)
    handle = amp.init(device_type=device, verbose=False)

    def backward(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return Way(backward, optimizer.step, optimizer, close=handle._deactivate)


# By name: the dtype of the weights, and what makes the way.
WAYS: dict[str, tuple[torch.dtype, Callable[[nn.Module, str], Way]]] = {
    "torch autocast fp16 + GradScaler + AdamW(fused), fp32 weights": (
        torch.float32, with_torch_scaler),
    "torch autocast bf16 + AdamW(fused), fp32 weights": (
        torch.float32, lambda model, device: with_torch(model, BF16)),
    "torch bf16 weights + AdamW(fused), no masters": (
        BF16, lambda model, device: with_torch(model, None)),
    "ours fp16 weights, GradScaler, masters": (
        F16, lambda model, device: with_our_scaler(model, device, master_weights="float32")),
    "ours fp16 weights, GradScaler, split masters": (
        F16, lambda model, device: with_our_scaler(model, device, master_weights="split")),
    "ours fp16 weights, GradScaler, split, bf16 moments": (
        F16, lambda model, device: with_our_scaler(model, device, **NARROW)),
    "ours bf16 weights, split, bf16 moments, stochastic": (
        BF16, lambda model, device: with_fused_adam(model, stochastic_rounding=True, **NARROW)),
    "ours FP16_Optimizer(FusedAdam)": (F16, lambda model, device: with_fp16_optimizer(model)),
    "ours fp32 weights + autocast fp16, our GradScaler, FusedAdam": (
        torch.float32, lambda model, device: with_our_scaler(model, device, F16)),
    "ours amp.init scale_loss FusedAdam": (torch.float32, with_handle),
}  # fmt: skip
OFFLOADED: dict[str, tuple[torch.dtype, Callable[[nn.Module, str], Way]]] = {
    "ours fp16 weights, GradScaler, masters": WAYS["ours fp16 weights, GradScaler, masters"],
    "the same, offload=True": (
        F16, lambda model, device: with_our_scaler(
            model, device, master_weights="float32", offload=True)),
    'the same, offload="gradients"': (
        F16, lambda model, device: with_our_scaler(
            model, device, master_weights="float32", offload="gradients")),
}  # fmt: skip
# With --offload: backwards a step, and layers, so that the state has some 250M parameters.
BACKWARDS, OFFLOADED_LAYERS = 8, 3


def decoder(size: Size, device: str) -> nn.Module:
    """Return Llama with random weights, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=4 * size.width,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        max_position_embeddings=size.length, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config)


def tokens(size: Size, device: str) -> list[Tensor]:
    """Return a batch for each step."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.randperm(size.vocabulary, generator=generator)
    shape = (size.warm_up + size.steps, size.batch, size.length)
    drawn = torch.randint(size.vocabulary, shape, generator=generator)
    is_drawn = torch.rand(shape, generator=generator) < 0.1
    for place in range(1, size.length):
        before = follows[drawn[..., place - 1]]
        drawn[..., place] = torch.where(is_drawn[..., place], drawn[..., place], before)
    return [*drawn.to(device).unbind()]


def measure(name: str, size: Size, clock: Cpu, backwards: int = 1) -> dict[str, Any]:
    """Train by one way, each batch in `backwards` equal steps; return times, memory and losses."""
    device = clock.tensors
    dtype, make = {**OFFLOADED, **WAYS}[name]
    model = decoder(size, device)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    batches = tokens(size, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    way = make(model, device)
    marks, losses = [], []
    try:
        for batch in batches:
            begin = clock.mark()
            low = way.autocast_dtype
            for _ in range(backwards):
                with torch.autocast(device, low, enabled=low is not None):
                    loss = model(input_ids=batch, labels=batch).loss
                way.backward(loss / backwards)
            before_step = clock.mark()
            way.step()
            end = clock.mark()
            way.optimizer.zero_grad()
            marks.append((begin, before_step, end, clock.mark()))
            losses.append(loss.detach())
    finally:
        way.close()
    clock.wait()
    timed = marks[size.warm_up :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "case": name,
        "params": sum(param.numel() for param in model.parameters()),
        "step_ms": _ms(clock.seconds(begin, end) for begin, *_, end in timed),
        "optimizer_ms": _ms(clock.seconds(begin, end) for _, begin, end, _ in timed),
        "peak_GiB": None if peak is None else round(peak, 2),
        "loss0": round(float(losses[0]), 4),
        "loss_last5": round(statistics.mean(map(float, losses[-LAST:])), 4),
    }


def _ms(seconds: Any) -> float:
    return round(1e3 * statistics.median(seconds), 2)


def page(results: dict[str, Any]) -> str:
    """Return what docs/data.md shows: what was trained, and the table."""
    head = ["way", "ms a step", "of it the optimizer", "peak, GiB", "loss at the end"]
    rows = [
        [
            *(row["case"], f"{row['step_ms']:.1f}", f"{row['optimizer_ms']:.1f}"),
            *(f"{row['peak_GiB']:.1f}" if row["peak_GiB"] else "-", f"{row['loss_last5']:.2f}"),
        ]
        for row in results["rows"]
    ]
    return "\n".join([results["what"], "", *markdown(head, rows)])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--offload", action="store_true", help="compare ways to offload")
    parser.add_argument("--ways", nargs="+", metavar="PART", help="with this in their name [all]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for JSON and picture")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        parser.error("the decoder is one of transformers: pip install transformers")
    default_results = RESULTS if args.device == "cuda" and not args.ways else Path("build/bench")
    args.results = args.results or default_results
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    import transformers

    size, clock = SIZES[args.device], DEVICES[args.device]()
    if args.offload:
        size = size._replace(warm_up=1, steps=4, layers=min(size.layers, OFFLOADED_LAYERS))
    facts = environment(args.device)
    what = (
        f"whole training steps of a decoder on {facts['device']}, torch {torch.__version__}; Llama "
        f"of transformers {transformers.__version__}, hidden {size.width}, {size.layers} layers, "
        f"vocabulary {size.vocabulary}, tied; batch {size.batch} x {size.length}, clip {CLIP}, lr "
        f"{LR:g}; medians of {size.steps} steps after {size.warm_up}"
        + (f"; {BACKWARDS} backwards a step" if args.offload else "")
    )
    results: dict[str, Any] = {"what": what, "commit": commit(), "environment": facts, "rows": []}
    which = "training-offload" if args.offload else "training"
    path = args.results / f"{which}-{step_machine.slug(facts['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in OFFLOADED if args.offload else WAYS:
        if args.ways is None or any(part in name for part in args.ways):
            gc.collect()  # Frees the previous model.
            backwards = BACKWARDS if args.offload else 1
            with stand_in(args.device):
                results["rows"].append(measure(name, size, clock, backwards))
            path.write_text(json.dumps(results, indent=1) + "\n")
    print(page(results))
    if args.device == "cuda" and not args.offload and importlib.util.find_spec("matplotlib"):
        from benchmarks.training_chart import draw  # Nothing else here needs matplotlib.

        draw(results, path.with_suffix(".png"))
    return results


if __name__ == "__main__":
    sys.exit(not main()["rows"])
