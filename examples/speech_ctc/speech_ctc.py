"""Train an acoustic model by CTC in float32, and go on in mixed precision, as in TensorFlow 1.

    python examples/speech_ctc/speech_ctc.py                  float16 weights with float32 masters
    python examples/speech_ctc/speech_ctc.py --variables float32  float32 weights
    python examples/speech_ctc/speech_ctc.py --loss_scale 128  FixedLossScaleManager
    python examples/speech_ctc/speech_ctc.py --data FOLDER    recordings, such as 407_anna.wav
    python examples/speech_ctc/speech_ctc.py --resume         go on where a run was killed

Three runs: a float32 one, that one gone on in float32, and the same checkpoint gone on in mixed
precision. apex_mp.convert.load restores it there and prints from which dtype to which; what
--keep_fp32 names stays in float32; LossScaleOptimizer asks a loss-scale manager. Each run saves a
checkpoint in --out, and --resume goes on from these to the same bits.

The default utterances are strings of handwritten digits of scikit-learn, read column by column, as
a spectrogram is. A folder must hold WAV files of 16 bits, named by the digits that are said.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import apex_mp
from apex_mp import amp, cast_parameters, convert, keep_fp32
from apex_mp.loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleOptimizer,
)
from apex_mp.optimizers import FusedAdam

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for arguments.py
from arguments import device, existing, positive

try:
    from speech_data import Utterance, collate, load_data
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}; this recipe needs: pip install scikit-learn tqdm")

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "speech_ctc"
BLANK = 10  # the label of CTC beside the ten digits


class AcousticModel(nn.Module):
    """Convolutions over time, a head, and the probabilities of labels for each frame."""

    def __init__(self, features: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (features, channels, channels):
            layers += [nn.Conv1d(inputs, channels, 5, padding=2), nn.BatchNorm1d(channels)]
            layers += [nn.ReLU()]
        self.encoder = nn.Sequential(*layers)
        self.head = nn.Conv1d(channels, BLANK + 1, 1)
        self.softmax = nn.LogSoftmax(1)
        self.loss = nn.CTCLoss(BLANK)

    def forward(self, frames: Tensor) -> Tensor:
        return self.softmax(self.head(self.encoder(frames)))


def loss_of(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    frames, lengths, labels, counts = batch
    return model.loss(model(frames).permute(2, 0, 1), labels, lengths, counts)


def decoded(log_probs: Tensor, length: int) -> list[int]:
    """The likeliest label of each frame, without repetitions and blanks."""
    best = log_probs[:, :length].argmax(0).tolist()
    kept = [label for label, before in zip(best, [BLANK, *best], strict=False) if label != before]
    return [label for label in kept if label != BLANK]


def edits(said: list[int], heard: list[int]) -> int:
    """The least number of labels to insert, delete or replace."""
    row = list(range(len(heard) + 1))
    for i, label in enumerate(said, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (label != other))
    return row[-1]


class Run:
    """A model, its optimizer, and how far it is trained."""

    def __init__(self, args: argparse.Namespace, name: str, features: int, steps: int) -> None:
        self.args, self.name, self.total = args, name, steps
        self.mixed, self.done, self.skipped = name.startswith("mixed"), 0, 0
        self.path = args.out / f"{name.replace(', ', '-').replace(' ', '-')}.pt"
        torch.manual_seed(args.seed)
        model = AcousticModel(features, args.channels)
        if self.mixed:
            keep_fp32(model, args.keep_fp32, outputs=torch.float32)
        halved = self.mixed and args.variables == "float16"
        if halved:
            cast_parameters(model)
        self.model = model.to(args.device)
        self.optimizer: Any = FusedAdam(self.model.parameters(), lr=args.learning_rate)
        if self.mixed:
            self.optimizer = LossScaleOptimizer(
                self.optimizer, new_manager(args), model=self.model, verbose=False
            )
        casts = self.mixed and not halved
        self.compute = amp.fp16_compute(self.model) if casts else self.model
        self.dtype = torch.float16 if halved else torch.float32

    def batch(self, data: list[Utterance]) -> tuple[Tensor, ...]:
        chosen = random.Random(f"{self.args.seed} {self.done}").sample(
            data, min(self.args.batch_size, len(data))
        )
        frames, *rest = collate(chosen, self.args.device)
        return frames.to(self.dtype), *rest

    def step(self, data: list[Utterance]) -> float:
        loss = loss_of(self.compute, self.batch(data))
        if self.mixed:
            self.optimizer.minimize(loss)
            self.skipped += self.optimizer.overflow
        else:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.done += 1
        return loss.item()

    def train(self, data: list[Utterance]) -> None:
        self.model.train()
        bar = tqdm(range(self.total), self.name, initial=self.done, disable=None, file=sys.stderr)
        with bar:
            while self.done < self.total:
                loss = self.step(data)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()
                if self.done % self.args.save_every == 0 or self.done == self.total:
                    apex_mp.save_checkpoint(self.state_dict(), self.path)

    @torch.no_grad()
    def error_rate(self, data: list[Utterance]) -> float:
        """Return edits per label, in percent."""
        self.model.eval()
        wrong = labels = 0
        for start in range(0, len(data), 64):
            part = data[start : start + 64]
            frames, lengths, _, _ = collate(part, self.args.device)
            log_probs = self.compute(frames.to(self.dtype)).float().cpu()
            for (_, said), probs, length in zip(part, log_probs, lengths.tolist(), strict=True):
                wrong, labels = wrong + edits(said, decoded(probs, length)), labels + len(said)
        return 100 * wrong / labels

    def held(self, data: list[Utterance]) -> tuple[float, float]:
        """Return KiB of the model, and KiB that autograd holds for backward for an utterance."""
        parts = [*self.model.parameters(), *self.model.buffers()]
        own = {part.untyped_storage().data_ptr() for part in parts}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()  # Views of one are held once.
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        state = self.model.state_dict().values()
        size = sum(t.numel() * t.element_size() for t in state)
        frames, *rest = collate(data[: self.args.batch_size], self.args.device)
        self.model.eval()  # Statistics of batch norms stay as they are.
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss_of(self.compute, (frames.to(self.dtype), *rest))
        del loss
        return size / 1024, sum(saved.values()) / 1024 / len(frames)

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": settings(self.args, self.name),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": [self.done, self.skipped],
        }

    def resume(self) -> None:
        state = read(self.path, self.args, self.name)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.skipped = state["progress"]

    def restore(self, path: Path, report: Any) -> None:
        """Go on from a float32 run: its weights, unrounded in masters, and its moments."""
        state = read(path, self.args, "float32")
        convert.load(self.model, state["model"], self.optimizer, report=report)
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["progress"][0]


def new_manager(args: argparse.Namespace) -> Any:
    if args.loss_scale:
        return FixedLossScaleManager(args.loss_scale)
    return ExponentialUpdateLossScaleManager(
        args.init_loss_scale,
        args.incr_every_n_steps,
        args.decr_every_n_nan_or_inf,
        args.incr_ratio,
        args.decr_ratio,
    )


def settings(args: argparse.Namespace, name: str) -> dict[str, str]:
    """What a run must have in common with the one that it resumes."""
    names = ["data", "channels", "batch_size", "learning_rate", "seed"]
    if name.startswith("mixed"):
        names += ["variables", "keep_fp32", "loss_scale"]
    return {"run": name, **{each: str(getattr(args, each)) for each in names}}


def read(path: Path, args: argparse.Namespace, name: str) -> dict[str, Any]:
    try:
        state = apex_mp.load_checkpoint(path)
    except (OSError, pickle.UnpicklingError) as error:
        sys.exit(f"{path}: {error}; remove it, or give another --out")
    if not isinstance(state, dict) or "settings" not in state:
        sys.exit(f"{path} is no checkpoint of this program; remove it, or give another --out")
    for key, value in settings(args, name).items():
        saved = state["settings"].get(key)
        if saved != value:
            sys.exit(f"{path} was saved with {key} {saved}, and {key} is {value} now")
    return state


def row(run: Run, test: list[Utterance]) -> str:
    model, held = run.held(test)
    scale = f"{run.optimizer.loss_scale:.0f}" if run.mixed else "none"
    return (
        f"| {run.name:<18} | {run.done:5} | {run.error_rate(test):13.1f} | {model:10.1f} | "
        f"{held:19.1f} | {scale:>10} | {run.skipped:7} |"
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    train, test = load_data(args.data)
    features, steps = train[0][0].shape[1], args.steps + args.more_steps
    plan = {"float32": args.steps, "float32, gone on": steps, "mixed, gone on": steps}
    try:
        runs = [Run(args, name, features, total) for name, total in plan.items()]
    except (TypeError, ValueError) as error:  # A part that is not there, a wrong loss scale.
        sys.exit(str(error))
    report: list[str] = []
    for run in runs:
        if run is not runs[0]:
            run.restore(runs[0].path, report.append if run.mixed else None)
        if args.resume and run.path.exists():
            run.resume()
        run.train(train)
    print(f"{len(train)} utterances to train on, {len(test)} to test on")
    print(f"The mixed run keeps {', '.join(args.keep_fp32)} in float32. Restored:")
    print("\n".join(f"  {line}" for line in report))
    print(
        "\n| run                | steps | error rate, % | model, KiB | held, KiB/utterance "
        "| loss scale | skipped |"
    )
    print(
        "| ------------------ | ----: | ------------: | ---------: | ------------------: "
        "| ---------: | ------: |"
    )
    for run in runs:
        print(row(run, test))
    print("Error rate: digits to insert, delete or replace, of those said in the test utterances.")
    print("Held: what autograd keeps from forward for backward.")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, default: Any, text: str, **options: Any) -> None:
        parser.add_argument(name, default=default, help=f"{text} [{default}]", **options)

    add("--data", None, "a folder of WAV files; None: the digits of scikit-learn", type=existing)
    add("--variables", "float16", "of the mixed run", choices=["float16", "float32"])
    parts = ["head", "softmax", "loss"]
    add("--keep_fp32", parts, "parts of the mixed model that stay float32", nargs="+")
    add("--loss_scale", 0.0, "a fixed loss scale; 0: one that changes, as below", type=float)
    add("--init_loss_scale", 2.0**20, "of the loss scale that changes", type=float)
    add("--incr_every_n_steps", 50, "good steps in a row before it grows", type=int)
    add("--decr_every_n_nan_or_inf", 2, "bad steps before it shrinks", type=int)
    add("--incr_ratio", 2.0, "growth multiplies it by this", type=float)
    add("--decr_ratio", 0.8, "shrinking multiplies it by this", type=float)
    add("--steps", 300, "of the float32 run", type=positive)
    add("--more_steps", 150, "that each of the others goes on", type=int)
    add("--batch_size", 32, "utterances a step", type=positive)
    add("--channels", 32, "of the convolutions", type=positive)
    add("--learning_rate", 0.003, "of FusedAdam", type=float)
    add("--seed", 0, "of weights and batches", type=int)
    add("--save_every", 50, "steps between checkpoints", type=positive)
    add("--out", OUTPUT, "folder for the checkpoints", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", where, "cpu or cuda", type=device)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
