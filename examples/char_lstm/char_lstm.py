"""Train a character LSTM on Python's own reference manual, and let it write some.

    python examples/char_lstm/char_lstm.py                            float32
    python examples/char_lstm/char_lstm.py --amp                      mixed precision, float16
    python examples/char_lstm/char_lstm.py --amp --dtype bfloat16
    python examples/char_lstm/char_lstm.py --save lstm.pt             and --resume lstm.pt to go on

The text is `pydoc_data.topics`, which every CPython carries. The lines about amp_handle are all
that mixed precision takes; without --amp they do nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from tqdm import tqdm

import apex_mp
from apex_mp import amp
from apex_mp.optimizers import FusedAdam

HELD_OUT = 20  # one topic in so many is not trained on


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train, print a sample, and return the figures of the end."""
    torch.manual_seed(args.seed)
    text = Text(args.device)
    model = CharLSTM(len(text.characters), args.hidden, args.layers).to(args.device)
    optimizer = FusedAdam(model.parameters(), lr=args.learning_rate, max_grad_norm=1.0)
    amp_handle = amp.init(
        enabled=args.amp, dtype=getattr(torch, args.dtype), device_type=args.device
    )
    optimizer = amp_handle.wrap_optimizer(optimizer)
    generator = torch.Generator().manual_seed(args.seed)
    done = load(args, model, optimizer, generator) if args.resume else 0

    mean_loss, skipped = float("nan"), 0
    with tqdm(total=args.steps, initial=done, unit="step", disable=None, file=sys.stderr) as bar:
        for step in range(done, args.steps):
            inputs, targets = text.batch(args.batch_size, args.length, generator)
            loss = cross_entropy(model(inputs)[0], targets)
            optimizer.zero_grad()
            with optimizer.scale_loss(loss) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            skipped += optimizer.step_was_skipped
            value = loss.item()
            mean_loss = value if step == done else 0.95 * mean_loss + 0.05 * value
            bar.set_postfix_str(f"perplexity {math.exp(mean_loss):.2f}", refresh=False)
            bar.update()
    if args.save:
        save(args, model, optimizer, generator)

    result = {
        "loss": mean_loss,
        "perplexity": math.exp(mean_loss),
        "test_perplexity": perplexity_of_test(model, text, args.length),
        "skipped": float(skipped),
    }
    precision = args.dtype if args.amp else "float32"
    print(
        f"{precision}: perplexity {result['perplexity']:.2f} while training (running mean), "
        f"{result['test_perplexity']:.2f} on the rest; {skipped} of {args.steps - done} steps "
        "skipped"
    )
    print("--- what it writes:")
    print(write(model, text, "The ", args.sample, args.temperature).rstrip())
    amp_handle._deactivate()
    return result


class CharLSTM(nn.Module):
    """Embedding, LSTM, and a score for each next character."""

    def __init__(self, characters: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.decoder = nn.Linear(hidden, characters)

    def forward(self, text: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        output, state = self.lstm(self.embedding(text), state)
        return self.decoder(output), state


class Text:
    """The manual as numbers, cut into a part to train on and one to test on."""

    def __init__(self, device: str) -> None:
        names = sorted(topics)
        self.characters = sorted(set("".join(topics.values())))
        self.number_of = {character: i for i, character in enumerate(self.characters)}
        held_out = names[::HELD_OUT]
        self.test = self._numbers(held_out, device)
        self.train = self._numbers([name for name in names if name not in held_out], device)

    def _numbers(self, names: list[str], device: str) -> Tensor:
        text = "\n\n".join(topics[name] for name in names)
        return torch.tensor([self.number_of[character] for character in text], device=device)

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pieces of the training text, and the same a character later."""
        starts = torch.randint(len(self.train) - length - 1, (size,), generator=generator)
        pieces = torch.stack([self.train[s : s + length + 1] for s in starts.tolist()])
        return pieces[:, :-1], pieces[:, 1:]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def perplexity_of_test(model: nn.Module, text: Text, length: int) -> float:
    """exp of the mean loss on text that was not trained on."""
    pieces = (len(text.test) - 1) // length
    usable = text.test[: pieces * length + 1]
    inputs, targets = usable[:-1].view(pieces, length), usable[1:].view(pieces, length)
    return math.exp(cross_entropy(model(inputs)[0], targets).item())


@torch.no_grad()
def write(model: nn.Module, text: Text, start: str, count: int, temperature: float) -> str:
    """Let the model go on from `start`, a character at a time."""
    device = text.train.device
    generator = torch.Generator().manual_seed(0)
    written, state = start, None
    given = torch.tensor([[text.number_of[character] for character in start]], device=device)
    for _ in range(count):
        scores, state = model(given, state)
        probabilities = F.softmax(scores[0, -1].float() / temperature, dim=-1).cpu()
        choice = int(torch.multinomial(probabilities, 1, generator=generator))
        written += text.characters[choice]
        given = torch.tensor([[choice]], device=device)
    return written


def save(
    args: argparse.Namespace, model: nn.Module, optimizer: Any, generator: torch.Generator
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),  # With the loss scale.
        "generator": generator.get_state(),
        "steps": args.steps,
    }
    apex_mp.save_checkpoint(state, args.save)


def load(
    args: argparse.Namespace, model: nn.Module, optimizer: Any, generator: torch.Generator
) -> int:
    """Take everything up where `save` left it; return the number of steps done."""
    state = apex_mp.load_checkpoint(args.resume)
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    if {name: value.shape for name, value in state["model"].items()} != wanted:
        sys.exit(f"--resume {args.resume} is of another model; give its --hidden and --layers")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["generator"])
    return int(state["steps"])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--amp", action="store_true", help="mixed precision")
    add("--dtype", choices=["float16", "bfloat16"], default="float16", help="with --amp")
    add("--hidden", type=int, default=64, help="size of the LSTM's state")
    add("--layers", type=int, default=1, help="of the LSTM")
    add("--steps", type=int, default=600, help="in all, those before --resume counted")
    add("--batch_size", type=int, default=32, help="pieces of text a step")
    add("--length", type=int, default=64, help="characters of a piece")
    add("--learning_rate", type=float, default=0.01, help="of FusedAdam")
    add("--sample", type=int, default=300, help="characters to write at the end")
    add("--temperature", type=float, default=0.7, help="of the sample; lower is safer")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--threads", type=int, default=1, help="of the CPU")
    add("--save", type=Path, metavar="FILE", help="write a checkpoint at the end")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    return train(args)


if __name__ == "__main__":
    main()
