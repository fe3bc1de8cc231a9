"""What main_amp.py and main_fp16_optimizer.py share: processes, epochs, checkpoints, the table."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import common
import torch
from common import Folder, Prefetcher
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from apex_mp.checkpoint import load_checkpoint, save_checkpoint

LOG = logging.getLogger("imagenet")
WARMUP, STEPS = 5, (30, 60, 80)  # epochs
# A run that differs in one of these does not go on to the bits of the one that was saved.
BITS = ("batch_size", "world", "lr", "momentum", "weight_decay", "sync_bn")
BITS += ("seed", "size", "min_area", "flip")
# The columns of the table, and how many digits they have behind the point.
COLUMNS = {
    "epoch": 0,
    "lr": 5,
    "train loss": 3,
    "train top-1": 1,
    "val loss": 3,
    "val top-1": 1,
    "val top-5": 1,
    "images/s": 0,
    "loss scale": 0,
}


@dataclass
class Training:
    """One way to train, as a main has set it up.

    Attributes:
        api: What runs, as the first line of the log says it; the same one resumes a checkpoint.
        model: The model itself, without DistributedDataParallel around it.
        optimizer: Has the learning rate, and a state.
        step: Takes images and labels, trains on them, and returns scores and loss.
        loss_scale: Returns the factor on the loss.
        others: What else has a state, by name.
    """

    api: str
    model: nn.Module
    optimizer: Any
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    loss_scale: Callable[[], float]
    others: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self.others}


@contextlib.contextmanager
def session(args: argparse.Namespace, api: str) -> Iterator[tuple[Folder, Folder]]:
    """Say which API runs, open the images, and join the other processes.

    Yields:
        The images to train on, and those to validate.
    """
    level = logging.ERROR if args.rank else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
    LOG.info("%s", api)
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        if args.local_rank >= gpus:
            sys.exit(
                f"--device cuda, --local-rank {args.local_rank}: this machine has {gpus} GPUs; "
                "start one process for each, or give --device cpu"
            )
        torch.cuda.set_device(args.local_rank)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # What --deterministic needs.
        torch.backends.cudnn.benchmark = not args.deterministic
    torch.use_deterministic_algorithms(args.deterministic, warn_only=True)
    torch.manual_seed(args.seed)
    with common.opened(args) as (train, val):
        if args.world > 1:
            dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        try:
            yield train, val
        finally:
            if args.world > 1:
                gc.collect()  # The model goes before its process group: see docs/parallel.md.
                dist.destroy_process_group()


def fit(args: argparse.Namespace, training: Training, train: Folder, val: Folder) -> Any:
    """Train as the flags say, save after each epoch, print the table, and return its rows."""
    rows = resume(args, training, train.classes) if args.resume else []
    if args.prof:
        return profile(args, training, train, len(rows))
    if args.evaluate:
        rows = [validate(args, training, val)]
    with logging_redirect_tqdm():
        for epoch in range(len(rows), 0 if args.evaluate else args.epochs):
            row = train_epoch(args, training, train, epoch)
            rows.append({**row, **validate(args, training, val)})
            LOG.info("; ".join(f"{name} {text}" for name, text in written(rows[-1]).items()))
            if args.rank == 0:
                save(args, training, train.classes, rows)
    if args.rank == 0:
        processes = f"{args.world} process{'es' * (args.world > 1)}"
        images = f"{len(train)} images to train on, {len(val)} to validate"
        print(f"{training.api}; {args.arch} on {args.device}, {processes};")
        print(f"{images}, of {args.size} x {args.size}\n")
        print(table([written(row) for row in rows]))
    return rows


def train_epoch(
    args: argparse.Namespace, training: Training, train: Folder, epoch: int
) -> dict[str, float]:
    """Train on each image once, or for --prof iterations; return a part of the table's row."""
    # All that is random depends on seed, epoch and rank, so a checkpoint need not hold its state.
    torch.manual_seed(args.seed + args.world * epoch + args.rank)
    train.epoch = epoch
    sampler = DistributedSampler(train, args.world, args.rank, shuffle=True, seed=args.seed)
    sampler.set_epoch(epoch)
    loader = DataLoader(
        train,
        args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=args.device == "cuda",
        drop_last=len(sampler) >= args.batch_size,
    )
    training.model.train()
    sums = torch.zeros(4, dtype=torch.float64, device=args.device)
    start, rate = time.perf_counter(), 0.0
    batches = itertools.islice(Prefetcher(loader, args.device), args.prof)
    bar = tqdm(batches, f"epoch {epoch}", len(loader), leave=False, disable=args.rank > 0 or None)
    for number, (batch, target) in enumerate(bar, 1):
        rate = learning_rate(args, epoch + number / len(loader))
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        output, loss = training.step(batch, target)
        sums += common.tally(output, loss, target)
        if number % 10 == 1:  # To read the loss is to wait for the GPU.
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    loss, top1, _, count = common.means(sums)
    speed = count / (time.perf_counter() - start)
    return {"epoch": epoch, "lr": rate, "train loss": loss, "train top-1": top1, "images/s": speed}


def learning_rate(args: argparse.Namespace, epoch: float) -> float:
    """The learning rate of an iteration that ends after `epoch` epochs."""
    full = args.lr * args.batch_size * args.world / 256
    return full * min(1.0, epoch / WARMUP) * 0.1 ** sum(epoch > step for step in STEPS)


def validate(args: argparse.Namespace, training: Training, val: Folder) -> dict[str, float]:
    """Return a part of the table's row."""
    if args.world > 1:  # Running statistics are of each process; all take those of the first.
        for buffer in training.model.buffers():
            dist.broadcast(buffer, 0)
    scores = common.validate(args, training.model, val)
    return {**scores, "loss scale": training.loss_scale()}


def profile(args: argparse.Namespace, training: Training, train: Folder, epoch: int) -> None:
    with torch.profiler.profile() as profiler:
        train_epoch(args, training, train, epoch)
    if args.rank == 0:
        times = profiler.key_averages()
        print(times.table(f"self_{args.device}_time_total", row_limit=20, max_name_column_width=40))


def written(row: dict[str, float]) -> dict[str, str]:
    return {name: f"{row[name]:.{digits}f}" for name, digits in COLUMNS.items() if name in row}


def table(rows: list[dict[str, str]]) -> str:
    """Return rows with the same keys as a table in Markdown."""
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))} |"
        for line in lines
    )


def save(
    args: argparse.Namespace, training: Training, classes: list[str], rows: list[dict[str, float]]
) -> None:
    """Write the checkpoint, and a copy if no epoch before was as good."""
    state = {
        "run": {"-a": args.arch, "classes": classes, "API": training.api},
        "settings": {name: getattr(args, name) for name in BITS},
        "rows": rows,
        **{name: part.state_dict() for name, part in training.parts().items()},
    }
    args.save.mkdir(parents=True, exist_ok=True)
    save_checkpoint(state, args.save / "checkpoint.pth.tar")
    if rows[-1]["val top-1"] >= max(row["val top-1"] for row in rows):
        save_checkpoint(state, args.save / "model_best.pth.tar")


def resume(args: argparse.Namespace, training: Training, classes: list[str]) -> list[Any]:
    """Take up what `save` left; return the table's rows until then.

    Raises:
        SystemExit: The file is no checkpoint, or one of another model; nothing is changed.
    """
    try:
        state = load_checkpoint(args.resume)
        run, settings = state["run"], state["settings"]
    except FileNotFoundError:
        sys.exit(f"--resume {args.resume}: there is no such file")
    except Exception as error:
        sys.exit(f"--resume {args.resume}: {error!r}; it must be a checkpoint of this program")
    wanted = {"-a": args.arch, "classes": classes}
    if not args.evaluate:
        wanted["API"] = training.api
    for name, value in wanted.items():
        if run[name] != value:
            sys.exit(
                f"--resume {args.resume}: {name} is {shorten(str(value), 80)} here, and was "
                f"{shorten(str(run[name]), 80)} there; it must be the same"
            )
    if args.evaluate:
        training.model.load_state_dict(state["model"])
        return []
    for name, part in training.parts().items():
        part.load_state_dict(state[name])
    for group in training.optimizer.param_groups:
        group.update(momentum=args.momentum, weight_decay=args.weight_decay)
    for name, value in settings.items():
        if value != getattr(args, name):
            now = getattr(args, name)
            LOG.warning("--resume: %s is %s, was %s; bits will differ", name, now, value)
    return list(state["rows"])
