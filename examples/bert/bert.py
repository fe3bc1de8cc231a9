"""Sentence classification with BERT in mixed precision, by each API that there is for it.

    python examples/bert/bert.py                       FP16_Optimizer around FusedAdam
    python examples/bert/bert.py --amp O1              amp.initialize
    python examples/bert/bert.py --local_world_size 2  two processes
    python examples/bert/bert.py --compare             each of them; a table

Without --data the texts are docstrings of six packages of Python, and a label is the package.
Without --model_path the model is a small BERT with random weights. What differs between the APIs is
in the classes of bert_apis.py: read these first.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import socket
import statistics
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from bert_apis import APIS
from bert_compare import compare, summary
from bert_data import as_batch, docstrings, read_tsv, split
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DistributedSampler

from apex_mp import load_checkpoint, save_checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for arguments.py
from arguments import device, existing, positive

try:
    from bert_model import build_model, tokenizer
    from sklearn.metrics import classification_report
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}; this recipe needs: pip install transformers scikit-learn tqdm")

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "bert"
# Flags that decide what a run computes: a checkpoint of a run with others is refused.
SETUP = (
    *("amp", "loss_scale", "learning_rate", "train_batch_size", "gradient_accumulation_steps"),
    *("weight_decay", "warmup_proportion", "max_seq_len", "epochs", "seed", "eval_step", "split"),
    *("data", "model_path", "hidden_size", "layers", "dropout", "world"),
)


def warmup_linear(x: float, warmup: float) -> float:
    """The factor on the learning rate after the fraction x of all steps: up, then down to 0."""
    return x / warmup if x < warmup else max((1.0 - x) / (1.0 - warmup), 0.0)


class Run:
    """A training in one process: the data, the model, and what is saved of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        examples = read_tsv(args.data) if args.data else docstrings()
        self.labels = sorted({example.label for example in examples})
        train, dev = split(examples, args.split)
        encode, vocabulary, self.padding = tokenizer([example.text for example in train], args)
        self.train, self.dev = (
            [(encode(example.text), self.labels.index(example.label)) for example in part]
            for part in (train, dev)
        )
        model = build_model(vocabulary, len(self.labels), args).to(args.device)
        self.api = APIS[args.amp](model, args)
        self.model = self.api.model
        if args.world > 1:
            self.api.model = nn.parallel.DistributedDataParallel(self.model)
        torch.manual_seed(args.seed + args.rank)  # of dropout
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            self.train, args.world, args.rank, seed=args.seed, drop_last=True
        )
        self.own_batch = args.train_batch_size // args.world  # of one process
        self.batches = len(self.sampler) // self.own_batch // args.gradient_accumulation_steps
        if not self.batches:
            raise ValueError(
                f"--train_batch_size is {args.train_batch_size}: more than the {len(self.train)} "
                f"texts to train on, in {args.gradient_accumulation_steps} batches a step"
            )
        self.step, self.best, self.skipped = 0, 0.0, 0
        self.losses: list[float] = []
        self.seconds: list[float] = []  # of each epoch

    @property
    def steps(self) -> int:
        return self.batches * self.args.epochs

    def fit(self) -> None:
        """Train from where the run is to its end; evaluate and save every `eval_step` steps."""
        with tqdm(
            total=self.steps, initial=self.step, unit="step", disable=self.quiet, file=sys.stderr
        ) as bar:
            while self.step < self.steps:
                start = time.perf_counter()
                self.losses.append(self.train_step())
                self.step += 1
                epoch = (self.step - 1) // self.batches
                self.seconds += [0.0] * (epoch + 1 - len(self.seconds))
                self.seconds[epoch] += time.perf_counter() - start
                bar.update()
                bar.set_postfix(loss=f"{self.losses[-1]:.3f}", scale=f"{self.api.loss_scale():g}")
                if self.step % self.args.eval_step == 0 or self.step == self.steps:
                    accuracy, _ = self.evaluate()
                    better = accuracy > self.best
                    self.best = max(accuracy, self.best)
                    self.save("last.pt", *(["best.pt"] if better else []))

    @property
    def quiet(self) -> bool | None:
        return True if self.args.rank else None  # None: unless stderr is a terminal

    def train_step(self) -> float:
        """Take one step, and return its loss: the mean over all processes."""
        args, api = self.args, self.api
        api.model.train()
        factor = warmup_linear((self.step + 1) / self.steps, args.warmup_proportion)
        for group in api.optimizer.param_groups:
            group["lr"] = args.learning_rate * factor
        epoch, batch = divmod(self.step, self.batches)
        self.sampler.set_epoch(epoch)
        order = [*self.sampler]
        micro = args.gradient_accumulation_steps
        total = torch.zeros((), device=args.device)
        for part in range(micro):
            begin = (batch * micro + part) * self.own_batch
            rows = [self.train[index] for index in order[begin : begin + self.own_batch]]
            inputs, labels = self.on_device(rows)
            # Gradients are averaged over processes once, with the last part.
            with self.no_sync(part < micro - 1):
                loss = F.cross_entropy(api.forward(inputs), labels) / micro
                api.backward(loss)
            total += loss.detach()
        api.step()
        api.optimizer.zero_grad()
        self.skipped += api.was_skipped()
        if args.world > 1:
            dist.all_reduce(total)
        return total.item() / args.world

    def no_sync(self, unsynced: bool) -> AbstractContextManager[None]:
        if unsynced and self.args.world > 1:
            return self.api.model.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def on_device(self, rows: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = as_batch(rows, self.padding)
        moved = {name: each.to(self.args.device) for name, each in inputs.items()}
        return moved, labels.to(self.args.device)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, list[int]]:
        """Return the accuracy on dev and all predictions, gathered over the processes."""
        args = self.args
        self.model.eval()
        own = range(args.rank, len(self.dev), args.world)
        predicted: dict[int, int] = {}
        for begin in range(0, len(own), args.dev_batch_size):
            indices = own[begin : begin + args.dev_batch_size]
            inputs, _ = self.on_device([self.dev[index] for index in indices])
            scores = self.api.forward(inputs)
            predicted |= zip(indices, scores.argmax(dim=1).tolist(), strict=True)
        for part in self.gathered(predicted):
            predicted |= part
        found = [predicted[index] for index in range(len(self.dev))]
        right = sum(label == guess for (_, label), guess in zip(self.dev, found, strict=True))
        return right / len(self.dev), found

    def gathered(self, value: Any) -> list[Any]:
        """Return the value of each process."""
        values = [value] * self.args.world
        if self.args.world > 1:
            dist.all_gather_object(values, value)
        return values

    # Saving.

    def setup(self) -> dict[str, str]:
        return {name: str(getattr(self.args, name)) for name in SETUP}

    def save(self, *names: str) -> None:
        """Write a checkpoint under each of these names."""
        on_gpu = torch.device(self.args.device).type == "cuda"
        of_gpu = torch.cuda.get_rng_state(self.args.device) if on_gpu else None
        random = self.gathered((torch.get_rng_state(), of_gpu))
        if self.args.rank or self.args.compare:
            return
        state = {
            "setup": self.setup(),
            "model": self.model.state_dict(),
            "optimizer": self.api.optimizer.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.api.parts.items()},
            "random": random,
            **{name: getattr(self, name) for name in ("step", "best", "skipped", "losses")},
            "seconds": self.seconds,
        }
        self.args.ckpt_path.mkdir(parents=True, exist_ok=True)
        for name in names:
            save_checkpoint(state, self.args.ckpt_path / name)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: It is of a run with other flags, or of another recipe.
        """
        state = load_checkpoint(path)
        if not isinstance(state, dict) or "setup" not in state:
            raise ValueError(f"{path}: no checkpoint of this recipe")
        ours = self.setup()
        wrong = [name for name in SETUP if state["setup"].get(name) != ours[name]]
        if wrong:
            was = " ".join(f"--{name} {state['setup'].get(name)}" for name in wrong)
            now = " ".join(f"--{name} {ours[name]}" for name in wrong)
            raise ValueError(
                f"{path} is of a run with {was}, not {now}; give the same flags, or another "
                "--ckpt_path"
            )
        self.model.load_state_dict(state["model"])
        self.api.optimizer.load_state_dict(state["optimizer"])
        for name, part in self.api.parts.items():
            part.load_state_dict(state["parts"][name])
        of_cpu, of_gpu = state["random"][self.args.rank]
        torch.set_rng_state(of_cpu)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, self.args.device)
        for name in ("step", "best", "skipped", "losses", "seconds"):
            setattr(self, name, state[name])


# Processes.


def train(args: argparse.Namespace) -> Run:
    """Train in this process, one of `args.world`."""
    run = Run(args)
    last = args.ckpt_path / "last.pt"
    if args.resume and last.exists():
        run.load(last)
    elif args.resume and args.rank == 0:
        print(f"--resume: there is no {last} yet; training begins at step 0")
    run.fit()
    return run


def work(rank: int, args: argparse.Namespace) -> None:
    """Train as one of several processes; the first of them reports."""
    args.rank = rank
    on_gpu = args.device.startswith("cuda")
    if on_gpu:
        args.device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)
    else:
        torch.set_num_threads(max((os.cpu_count() or 1) // args.world, 1))
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=args.world)
    try:
        train_and_report(args)
        dist.barrier()  # gloo may wait for ever for a process that has left.
    finally:
        gc.collect()  # The model goes before its process group: see docs/parallel.md.
        dist.destroy_process_group()


def train_and_report(args: argparse.Namespace) -> None:
    run = train(args)
    accuracy, predicted = run.evaluate()
    if args.rank == 0:
        report(run, accuracy, predicted)


def summary_of_run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what --compare shows."""
    return summary(train(args))


def report(run: Run, accuracy: float, predicted: list[int]) -> None:
    """Print the classification report of the weights at the end, and how the training went."""
    labels = [label for _, label in run.dev]
    print(classification_report(labels, predicted, target_names=run.labels, zero_division=0))
    print(f"{run.args.amp} in {run.args.world} process{'es' * (run.args.world > 1)}")
    print(
        f"{len(run.train)} texts to train on, {len(run.dev)} for dev, of {len(run.labels)} labels"
    )
    print(
        f"dev accuracy {100 * accuracy:.1f} %, the best of all evaluations {100 * run.best:.1f} %"
    )
    print(f"{run.steps} steps, {run.skipped} skipped; loss scale {run.api.loss_scale():g}")
    print(f"{statistics.median(run.seconds):.1f} seconds per epoch")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--amp", choices=APIS, default="fp16_optimizer", help="the API [fp16_optimizer]")
    add("--fp16", action="store_true", help="the flag of 2019 for --amp fp16_optimizer")
    add("--loss_scale", type=float, default=0.0, help="a static scale; 0: dynamic [0]")
    add("--learning_rate", type=float, default=1e-3, help="at its highest; BERT-base: 5e-5 [1e-3]")
    add("--warmup_proportion", type=float, default=0.1, help="of all steps [0.1]")
    add("--weight_decay", type=float, default=0.01, help="but of biases and norms [0.01]")
    add("--train_batch_size", type=positive, default=32, help="of all processes together [32]")
    add("--gradient_accumulation_steps", type=positive, default=1, help="batches for a step [1]")
    add("--dev_batch_size", type=positive, default=64, help="[64]")
    add("--max_seq_len", type=positive, default=128, help="longer texts are cut [128]")
    add("--epochs", type=positive, default=4, help="[4]")
    add("--seed", type=int, default=0, help="of weights, order and dropout [0]")
    add("--eval_step", type=positive, default=50, help="steps from one evaluation to the next [50]")
    add("--split", type=float, default=0.92, help="share of the texts to train on [0.92]")
    add("--data", type=existing, metavar="TSV", help="lines of label<TAB>text [docstrings]")
    add("--model_path", help="folder or name of a model for transformers [a small BERT]")
    add("--hidden_size", type=positive, default=64, help="of the small BERT [64]")
    add("--layers", type=positive, default=2, help="of the small BERT [2]")
    add("--dropout", type=float, default=0.1, help="of the small BERT [0.1]")
    files = "gets last.pt and best.pt [examples/output/bert]"
    add("--ckpt_path", type=Path, default=OUTPUT, metavar="FOLDER", help=files)
    add("--resume", action="store_true", help="go on from last.pt, to the same bits")
    add("--local_world_size", type=positive, default=1, help="processes to start here [1]")
    add("--compare", action="store_true", help="train by each API; print a table, save nothing")
    add("--seeds", type=positive, default=3, help="of each API in --compare [3]")
    add("--device", type=device, help="[cuda if there is a GPU, else cpu]")
    args = parser.parse_args(argv)
    if args.fp16:
        args.amp = "fp16_optimizer"
    args.device = str(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check(args, parser)
    return args


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with a sentence if flags do not go together, or with this machine."""
    if not 0.0 < args.split < 1.0:
        parser.error(f"--split is {args.split}; it must be between 0 and 1")
    if not 0.0 <= args.warmup_proportion < 1.0:
        parser.error(f"--warmup_proportion is {args.warmup_proportion}; it must be in [0, 1)")
    if not args.loss_scale >= 0.0:
        parser.error(f"--loss_scale is {args.loss_scale}; it must be 0 (dynamic) or more")
    launched = "RANK" in os.environ
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ["WORLD_SIZE"]) if launched else args.local_world_size
    on_gpu = args.device.startswith("cuda")
    most = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    if not launched and args.world > most:
        parser.error(
            f"--local_world_size is {args.world}; this machine has {most} "
            f"{'GPU' if on_gpu else 'core'}{'s' * (most != 1)}, one for each process"
        )
    if args.compare and args.world > 1:
        parser.error("--compare trains in one process; leave out --local_world_size and launchers")
    if args.train_batch_size % args.world:
        parser.error(
            f"--train_batch_size is {args.train_batch_size}; it must be a multiple of the "
            f"{args.world} processes"
        )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        if args.compare:
            for line in compare(args, summary_of_run):
                print(line, flush=True)
        elif "RANK" in os.environ:
            work(args.rank, args)
        elif args.world > 1:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(free_port()))
            torch.multiprocessing.spawn(work, (args,), args.world)
        else:
            train_and_report(args)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
