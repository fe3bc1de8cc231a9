"""Train a small CNN on handwritten digits, with the loop that the BERT scripts of 2019 had.

    python examples/digits/digits.py --fp16                   dynamic loss scale
    python examples/digits/digits.py --fp16 --loss_scale 128  static loss scale
    python examples/digits/digits.py --amp                    amp.init() around the float32 script
    python examples/digits/digits.py --compare                every precision; a table and a picture

The 1,797 scans of 8 x 8 pixels come with scikit-learn. `build_optimizer` and the body of `train`
are the block that those scripts share; read these two first.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digits_picture as picture
import digits_report as report
import torch
import torch.nn.functional as F  # noqa: N812
from digits_measure import Run, Stopwatch, bytes_held_for_backward, bytes_of_state
from digits_task import Data, DigitsNet, batches, load_data
from torch import nn
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from apex_mp import _C, amp
from apex_mp.optimizers import FP16_Optimizer, FusedAdam

MAX_GRAD_NORM = 1.0

# What --compare runs: the name in the table, and the flags that differ.
COMPARED = {
    "fp32": {"fp16": False, "bf16": False},
    "fp16 static": {"fp16": True, "bf16": False, "loss_scale": 128.0},
    "fp16 dynamic": {"fp16": True, "bf16": False, "loss_scale": 0.0},
    "fp16 amp": {"fp16": False, "bf16": False, "amp": True},
    "bf16": {"fp16": False, "bf16": True},
}


def train(name: str, args: argparse.Namespace, data: Data, bar: tqdm) -> Run:
    """Train and test one model; the same seed gives every precision the same start and order."""
    train_x, train_y, test_x, test_y = data
    torch.manual_seed(args.seed)
    model = DigitsNet().to(args.device)
    if args.fp16:
        model.half()
    elif args.bf16:
        model.bfloat16()
    dtype = next(model.parameters()).dtype
    train_x, test_x = train_x.to(dtype), test_x.to(dtype)
    optimizer = build_optimizer(model, args)
    wrapped = isinstance(optimizer, FP16_Optimizer)
    # These two lines are all that amp takes in a float32 script: this, and scale_loss below.
    amp_handle = amp.init(enabled=args.amp, device_type=torch.device(args.device).type)

    run = Run(name, args.seed, scaled=args.fp16 or args.amp)
    probe = train_x[: args.batch_size]
    run.activation_bytes_per_image = bytes_held_for_backward(model, probe) / len(probe)
    watch = Stopwatch(args.device)
    steps = [index.to(args.device) for index in batches(len(train_x), args)]
    for global_step, index in enumerate(steps):
        input_ids, label_ids = train_x[index], train_y[index]
        watch.start()
        loss = F.cross_entropy(model(input_ids).float(), label_ids)
        if wrapped:
            optimizer.backward(loss)
        else:
            with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        run.forward_backward_ms.append(watch.lap())
        lr_this_step = args.learning_rate * warmup_linear(global_step / len(steps), args.warmup)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_this_step
        run.scales.append(loss_scale_of(optimizer, amp_handle))
        watch.start()
        if args.optimizer != "fused_adam":
            clip(optimizer, model)
        optimizer.step()
        run.step_ms.append(watch.lap())
        if amp.step_was_skipped(optimizer):
            run.note_skip(global_step, getattr(optimizer, "overflow_report", []))
        if global_step + 1 == len(steps):
            run.state_bytes_per_param = bytes_of_state(model, optimizer)
        optimizer.zero_grad()
        run.losses.append(loss.item())
        bar.set_postfix_str(f"loss {run.losses[-1]:.3f}", refresh=False)
        bar.update()

    run.final_scale = loss_scale_of(optimizer, amp_handle)
    with torch.no_grad():
        run.accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    amp_handle._deactivate()  # For the next run; a script of one run leaves it on.
    return run


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "norm"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    if args.optimizer == "fused_adam":
        optimizer = FusedAdam(
            optimizer_grouped_parameters,
            lr=args.learning_rate,
            bias_correction=False,
            max_grad_norm=MAX_GRAD_NORM,
        )
    elif args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    else:
        optimizer = torch.optim.SGD(
            optimizer_grouped_parameters, lr=args.learning_rate, momentum=0.9
        )
    # model= gives the overflow messages their parameter names; nothing else depends on it.
    if args.fp16 and args.loss_scale == 0:
        return FP16_Optimizer(
            optimizer,
            dynamic_loss_scale=True,
            dynamic_loss_args={"scale_window": args.scale_window},
            verbose=args.verbose,
            model=model,
        )
    if args.fp16 or args.bf16:
        scale = args.loss_scale if args.fp16 else 1.0
        return FP16_Optimizer(optimizer, static_loss_scale=scale, verbose=args.verbose, model=model)
    return optimizer


def clip(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Clip for optimizers without max_grad_norm, which FusedAdam has."""
    if isinstance(optimizer, FP16_Optimizer):
        optimizer.clip_master_grads(MAX_GRAD_NORM)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)


def warmup_linear(x: float, warmup: float) -> float:
    """The factor on the learning rate after the fraction x of all steps: up, then down to 0."""
    return x / warmup if x < warmup else max((1.0 - x) / (1.0 - warmup), 0.0)


def loss_scale_of(optimizer: torch.optim.Optimizer, amp_handle: Any) -> float:
    if isinstance(optimizer, FP16_Optimizer):
        return optimizer.loss_scale
    return amp_handle._default_scaler.loss_scale() if amp_handle.is_active() else 1.0


def compare(args: argparse.Namespace) -> list[Run]:
    """Train every precision from every seed, in turn, so that all see the same busy machine."""
    data = load_data(args.device)
    jobs = [
        (name, argparse.Namespace(**{**vars(args), **flags, "seed": seed, "verbose": False}))
        for seed in range(args.seed, args.seed + args.seeds)
        for name, flags in COMPARED.items()
    ]
    total = sum(sum(1 for _ in batches(len(data[0]), job)) for _, job in jobs)
    seeds = "1 seed" if args.seeds == 1 else f"{args.seeds} seeds"
    print(f"Training {len(COMPARED)} models from {seeds} on {args.device}:", flush=True)
    runs = []
    with progress(total) as bar:
        if bar.disable:  # Not a terminal: skipped steps are counted in the table, no more.
            logging.getLogger("apex_mp").setLevel(logging.ERROR)
        for name, job in jobs:
            bar.set_description(f"{name:<12} seed {job.seed}")
            runs.append(train(name, job, data, bar))
        bar.set_description("all")
    return runs


@contextlib.contextmanager
def progress(total: int) -> Iterator[tqdm]:
    """A bar; what is printed meanwhile, messages and warnings too, goes above it."""
    with (
        tqdm(total=total, unit="step", disable=None, dynamic_ncols=True, file=sys.stderr) as bar,
        contextlib.redirect_stdout(DummyTqdmFile(sys.stdout)),
        contextlib.redirect_stderr(DummyTqdmFile(sys.stderr)),
    ):
        yield bar


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="half the model, scale the loss")
    precision.add_argument("--amp", action="store_true", help="fp32 model, amp.init() in fp16")
    precision.add_argument("--bf16", action="store_true", help="bfloat16 model, fp32 masters")
    precision.add_argument("--compare", action="store_true", help="all precisions, in turn")
    add("--loss_scale", type=float, default=0.0, help="with --fp16: 0 is dynamic, else static")
    add("--scale_window", type=int, default=40, help="good steps before a dynamic scale doubles")
    add("--optimizer", choices=["fused_adam", "adamw", "sgd"], default="fused_adam", help="which")
    add("--learning_rate", type=float, default=None, help="peak; 0.1 for sgd, else 0.001")
    add("--warmup", type=float, default=0.1, help="fraction of the steps with a rising rate")
    add("--epochs", type=int, default=10, help="passes over the 1,347 training scans")
    add("--batch_size", type=int, default=32, help="scans a step")
    add("--max_batches", type=int, default=None, help="at most so many steps an epoch")
    add("--seed", type=int, default=0, help="of the weights and the order; --compare: the first")
    add("--seeds", type=int, default=1, help="with --compare: from how many seeds; README has 5")
    add(
        "--threads", type=int, default=1, help="of the CPU; more do not speed up a model this small"
    )
    add("--device", default="cuda" if torch.cuda.is_available() and _C.with_cuda else "cpu")
    add(
        "--output", type=Path, default=Path(__file__).resolve().parents[1] / "output", help="folder"
    )
    add("--save-results", type=Path, metavar="JSON", help="--compare: figures here, picture beside")
    args = parser.parse_args(argv)
    args.verbose = True
    if args.learning_rate is None:
        args.learning_rate = 0.1 if args.optimizer == "sgd" else 0.001
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.compare:
        results = report.summarise(compare(args), report.environment(args))
        print(f"\n{report.table(results)}\n\n{report.notes(results)}\n")
        written = [args.output / "digits.png"]
        if args.save_results is not None:
            written = [args.save_results.with_suffix(".png"), args.save_results]
            report.save(results, args.save_results)
        picture.draw(results, written[0])
        print("Written:", *map(os.path.relpath, written))
        return
    name = "fp16 amp" if args.amp else "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    data = load_data(args.device)
    with progress(sum(1 for _ in batches(len(data[0]), args))) as bar:
        run = train(name, args, data, bar)
    print(f"\n{report.table(report.summarise([run], report.environment(args)))}")


if __name__ == "__main__":
    main()
