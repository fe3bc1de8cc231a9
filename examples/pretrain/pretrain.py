"""Pretrain a decoder with 16-bit weights and float32 masters, in one process or sharded over many.

    python examples/pretrain/pretrain.py                                 one process, float16
    torchrun --nproc_per_node 2 examples/pretrain/pretrain.py            FSDP2 over 2
    torchrun --nproc_per_node 4 examples/pretrain/pretrain.py --replicate 2     HSDP: 2 copies
    ... --checkpoints FOLDER --save_every 100      a run that was stopped goes on when started again

The default is tiny and takes a minute on a CPU. `--width 4096 --layers 32 --heads 32 --length 4096
--recompute` is a model of 6.5 billion parameters.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from pretrain_data import Text
from pretrain_model import Decoder
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from apex_mp.amp import GradScaler
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam

sys.path.append(str(Path(__file__).resolve().parents[1]))
import arguments as of

SHAPE = ("width", "heads", "layers", "length", "dtype")  # what a checkpoint must agree with


class Run(Stateful):
    """A training, of which this process holds a part."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        self.args, self.rank, self.world = args, rank, world
        self.text = Text(args.text)
        with torch.device("meta"):
            shape = (args.width, args.heads, args.layers, args.length)
            model = Decoder(*shape, args.recompute).to(getattr(torch, args.dtype))
        if world > 1:
            names = ("replicate", "shard")
            sizes = (args.replicate, world // args.replicate)
            mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=names)
            mesh = mesh if args.replicate > 1 else mesh["shard"]
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model: Any = model.to_empty(device=args.device)
        self.model.initialize(args.seed)
        self.optimizer = FusedAdam(
            self.model.parameters(),
            lr=args.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            master_weights=True,
            offload=args.offload,
        )
        # bfloat16 needs no loss scale, but steps with inf or NaN are skipped and reported, too.
        scale = 2.0**16 if args.dtype == "float16" else 1.0
        self.scaler = GradScaler(args.device.type, init_scale=scale, model=self.model)
        self.monitor = Monitor(self.scaler, model=self.model, every=args.log_every)
        self.step = 0

    def train_step(self) -> Tensor:
        """Take a step; return the mean loss of this process's part of the batch."""
        args = self.args
        batch = self.text.batch(args.seed, self.step, args.batch_size, args.length)
        batch = batch.chunk(self.world)[self.rank].to(args.device)
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.clip_grad_norm_(self.optimizer, args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        return loss.detach()

    def loss(self, batch: Tensor) -> Tensor:
        scores = self.model(batch[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())

    def learning_rate(self) -> float:
        """Up in a straight line over the first steps, then down to a tenth by a cosine."""
        args = self.args
        if self.step < args.warmup:
            return float(args.learning_rate * (self.step + 1) / args.warmup)
        way = (self.step - args.warmup) / max(1, args.steps - args.warmup)
        return float(args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * way)))

    @torch.no_grad()
    def test_loss(self) -> float:
        """Mean loss on text that is not trained on; each process takes the whole of it."""
        self.model.eval()
        batches = self.text.test_batches(self.args.batch_size, self.args.length)
        losses = [self.loss(batch.to(self.args.device)) * len(batch) for batch in batches]
        self.model.train()
        return float(sum(losses)) / sum(map(len, batches))

    # Checkpoints: what torch.distributed.checkpoint saves of each process's part, and loads into
    # any number of processes.

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.scaler.state_dict()
        return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        self.scaler.load_state_dict(saved["scaler"])
        self.step = saved["step"]

    def shape(self) -> dict[str, Any]:
        return {name: getattr(self.args, name) for name in SHAPE}

    def save(self) -> None:
        folder = self.args.checkpoints / f"step-{self.step:08}"
        dcp.save({"run": self, "shape": self.shape()}, checkpoint_id=folder)

    def resume(self) -> None:
        """Go on from the newest checkpoint in the folder, if there is one."""
        # .metadata is written last: a folder without it was interrupted.
        whole = [file.parent for file in sorted(self.args.checkpoints.glob("step-*/.metadata"))]
        if not whole:
            return
        saved = dict.fromkeys(SHAPE)
        dcp.load({"shape": saved}, checkpoint_id=whole[-1])
        if saved != self.shape():
            flags = " ".join(f"--{name} {value}" for name, value in saved.items())
            sys.exit(f"{whole[-1]} is of a run with {flags}; give the same, or another folder")
        dcp.load({"run": self}, checkpoint_id=whole[-1])
        self.say(f"going on from {whole[-1]}")

    # Figures.

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def mean(self, value: Tensor) -> float:
        """Return the mean over all processes."""
        if self.world > 1:
            dist.all_reduce(value)
        return float(value) / self.world

    def state_bytes(self) -> int:
        """Return the bytes of weights, masters and moments in this process."""
        # Not those of the model, which FSDP2 leaves whole after a forward without backward.
        params = self.optimizer.param_groups[0]["params"]
        states = self.optimizer.state_dict(compact=True)["state"].values()
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        parts = [
            each.to_local() if isinstance(each, DTensor) else each for each in params + tensors
        ]
        return sum(part.numel() * part.element_size() for part in parts)

    def peak_bytes(self) -> int:
        """Return the largest memory of this process: of the GPU, or resident on the CPU."""
        if self.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.args.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Result:
    """What a run came to, in this process."""

    run: Run
    losses: list[float]
    test_loss: float


def train(args: argparse.Namespace, rank: int = 0, world: int = 1) -> Result:
    run = Run(args, rank, world)
    if args.checkpoints:
        run.resume()
    count = sum(param.numel() for param in run.model.parameters())
    run.say(
        f"{count:,} parameters in {args.dtype}, {args.batch_size * args.length:,} tokens a step, "
        f"{world} process{'' if world == 1 else 'es'}"
    )
    losses: list[float] = []
    since, at = time.perf_counter(), run.step
    while run.step < args.steps:
        loss = run.train_step()
        is_last = run.step == args.steps
        if run.step % args.log_every == 0 or is_last:
            losses.append(run.mean(loss))
            seconds = time.perf_counter() - since
            run.say(line(run, losses[-1], (run.step - at) / seconds))
            since, at = time.perf_counter(), run.step
        if args.checkpoints and (run.step % args.save_every == 0 or is_last):
            run.save()
    test_loss = run.test_loss()
    skipped = sum(step.skipped for step in run.monitor.history.steps)
    run.say(
        f"test loss {test_loss:.3f} ({test_loss / math.log(2):.3f} bits a byte); "
        f"{skipped} steps skipped; state {mib(run.state_bytes())}, peak {mib(run.peak_bytes())} "
        "in process 0"
    )
    if args.plot and rank == 0:
        run.monitor.plot(args.plot)
    return Result(run, losses, test_loss)


def line(run: Run, loss: float, steps_per_second: float) -> str:
    """Return what is printed every --log_every steps; all processes together."""
    tokens = steps_per_second * run.args.batch_size * run.args.length
    teraflops = tokens * run.model.flops_per_token(run.args.length) / 1e12
    figures = (
        f"step {run.step:>6}  loss {loss:.3f}  {tokens:,.0f} tokens/s  {teraflops:.3g} TFLOP/s"
    )
    if run.args.peak_tflops:
        figures += f", {teraflops / run.args.peak_tflops / run.world:.1%} of the peak"
    return figures


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--dtype", choices=["float16", "bfloat16"], default="float16", help="of the weights")
    add("--width", type=of.positive, default=64, help="of the decoder")
    add("--heads", type=of.positive, default=4, help="of its attention; they divide --width")
    add("--layers", type=of.positive, default=2, help="of the decoder")
    add("--length", type=of.positive, default=64, help="bytes of a piece of text")
    add("--recompute", action="store_true", help="activation checkpointing of each layer")
    add("--offload", action="store_true", help="masters and moments in host memory; one GPU")
    add("--steps", type=of.positive, default=400, help="in all, those of a checkpoint counted")
    add("--batch_size", type=of.positive, default=16, help="pieces a step, of all processes")
    add("--learning_rate", type=float, default=3e-3, help="of FusedAdam, the highest")
    add("--warmup", type=of.positive, default=20, help="steps until it is reached")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--replicate", type=of.positive, default=1, help="copies of the sharded model (HSDP)")
    add("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
    add("--save_every", type=of.positive, default=100, help="steps, with --checkpoints")
    add("--log_every", type=of.positive, default=50, help="steps between two lines")
    add("--peak_tflops", type=float, metavar="N", help="of one device, to print the share of it")
    add("--plot", metavar="FILE", help="the monitor's picture; needs matplotlib")
    add("--text", type=of.existing, nargs="+", default=(), help="files to train on instead")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--device", type=of.device, default=device, help="cpu or cuda")
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width}")
    if args.batch_size % world:
        parser.error(f"--batch_size {args.batch_size} must be a multiple of the {world} processes")
    if args.offload and (world > 1 or args.device.type != "cuda"):
        parser.error(
            f"--offload needs one process and a GPU, not {world} and {args.device}; with several "
            "pass CPUOffloadPolicy to fully_shard"
        )
    if world % args.replicate:
        parser.error(f"--replicate {args.replicate} must divide the {world} processes")
    text = Text(args.text)
    if min(len(text.train), len(text.test)) <= args.length:
        parser.error(
            f"--text has {len(text.train)} bytes to train on and {len(text.test)} to test on; "
            f"--length {args.length} needs more"
        )
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.device.type == "cuda":
        args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(args.device)
    backend = "nccl" if args.device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    train(args, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
