"""How a published snippet is run: what is replaced in it, and the names that it finds.

A snippet is a file of `published_snippets/`, a script as it was written when apex was new. It finds
a model, batches and `args`, and trains. `run` executes it, changed as REPLACED says and in nothing
else.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from apex_mp.amp.casts import current as _current
from apex_mp.amp.casts import registry

FOLDER = Path(__file__).parent / "published_snippets"
SNIPPETS = sorted(path.stem for path in FOLDER.glob("*.py"))

# `.cuda()` becomes `.to(device)`, so that a snippet runs where the other tests run.
_DEVICE = (r"\.cuda\(\)", ".to(device)")
REPLACED = {
    "apex_mp": ((r"\bfrom apex\b", "from apex_mp"), _DEVICE),
    # The reference: the same script in float32, with stand-ins that say what the names mean.
    "fp32": ((r"\bfrom apex\b", "from apex_in_fp32"), (r"\.half\(\)", ".float()"), _DEVICE),
}

BATCHES, BATCH, WORDS, LENGTH = 20, 16, 12, 6


def text_of(snippet: str, kind: str | None = None) -> str:
    """Return a snippet as it was published, or as it is run."""
    text = (FOLDER / f"{snippet}.py").read_text(encoding="utf-8")
    for pattern, replacement in REPLACED[kind] if kind else ():
        text = re.sub(pattern, replacement, text)
    return text


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


class Watch:
    """What a model sees of its own training, whatever the script around it says.

    Args:
        bad: Numbers of the forward passes whose gradients shall overflow.

    Attributes:
        finite: For each forward pass, whether the gradients after it were finite.
        moved: For each, whether the weights had changed when the next one began.
    """

    def __init__(self, bad: Collection[int] = ()) -> None:
        self.bad = bad
        self.finite: list[bool] = []
        self.moved: list[bool] = []
        self._before: list[Tensor] = []

    def see(self, model: nn.Module, output: Tensor) -> Tensor:
        if not (model.training and torch.is_grad_enabled()):
            return output
        self.look(model)
        if not self._before:  # Not earlier: the script has converted the weights by now.
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(self._see_grad)
        self._before = [param.detach().clone() for param in model.parameters()]
        self.finite.append(True)
        bad = len(self.finite) - 1 in self.bad
        return _InfiniteGradient.apply(output) if bad else output

    def look(self, model: nn.Module) -> None:
        """Compare the weights with those of the last forward pass."""
        if self._before:
            pairs = zip(model.parameters(), self._before, strict=True)
            self.moved.append(any(not torch.equal(p, before) for p, before in pairs))

    def _see_grad(self, param: Tensor) -> None:
        self.finite[-1] &= param.grad is not None and bool(param.grad.isfinite().all())

    def steps(self, every: int) -> tuple[list[bool], list[bool]]:
        """Return `finite` and `moved` for steps of that many forward passes each."""
        starts = range(0, len(self.finite), every)
        return (
            [all(self.finite[start : start + every]) for start in starts],
            [any(self.moved[start : start + every]) for start in starts],
        )


class TinyBert(nn.Module):
    """Embeddings, a LayerNorm and linear layers; returns the loss if it is given labels."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, 8)
        self.dense = nn.Linear(8, 8)
        self.LayerNorm = nn.LayerNorm(8)
        self.classifier = nn.Linear(8, 2)
        self.watch = watch

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.dense(self.embeddings(input_ids).mean(dim=1)).tanh()
        logits = self.watch.see(self, self.classifier(self.LayerNorm(hidden)))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


class TinyConvNet(nn.Module):
    """A convolution, batch norms and a linear layer."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 16, 2)
        self.watch = watch

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu().flatten(1)
        return self.watch.see(self, self.fc(hidden))


def sentences() -> list[tuple[Tensor, Tensor]]:
    """Batches of words, and whether most of a sentence's words are of the first half of all."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (BATCHES, BATCH, LENGTH), generator=generator)
    return [(batch, ((batch < WORDS // 2).sum(dim=1) > LENGTH // 2).long()) for batch in words]


def images() -> list[tuple[Tensor, Tensor]]:
    """Batches of images, and whether the upper half is the brighter one."""
    generator = torch.Generator().manual_seed(2)
    batches = torch.randn(BATCHES, BATCH, 1, 6, 6, generator=generator)
    return [(b, (b[:, :, :3].sum((1, 2, 3)) > b[:, :, 3:].sum((1, 2, 3))).long()) for b in batches]


# Each model and what it learns from.
WORLDS = {TinyBert: sentences, TinyConvNet: images}


@contextlib.contextmanager
def _amp_for_the_run(device: torch.device) -> Iterator[None]:
    """Let `amp.init()` find the device of the tests, and switch off what a script leaves on."""
    with mock.patch.object(torch.cuda, "is_available", return_value=device.type == "cuda"):
        try:
            yield
        finally:
            if _current.handle is not None:
                _current.handle._deactivate()
            registry.registrations.clear()


class Run:
    """A snippet that has run: the model as it began and as it is, and what the script left.

    Args:
        kind: Which of REPLACED.
        snippet: Name of a file in the folder, without `.py`.
        model: Which of WORLDS.
        device: Where it runs.
        bad: See Watch.
        batches: How many of the WORLDS' batches it learns from.
        **args: What the script finds in its `args`.
    """

    def __init__(
        self,
        kind: str,
        snippet: str,
        model: type[nn.Module],
        device: torch.device,
        bad: Collection[int] = (),
        batches: int = BATCHES,
        **args: Any,
    ) -> None:
        torch.manual_seed(3)
        self.watch = Watch(bad)
        self.model = model(self.watch)
        self.batches = WORLDS[model]()[:batches]
        self.start = self.weights()
        self.loss_before = self.loss()
        self.names: dict[str, Any] = {
            "args": argparse.Namespace(**args),
            "device": device.type,
            "model": self.model,
            "criterion": nn.CrossEntropyLoss(),
            "train_dataloader": self.batches,
            "train_loader": self.batches,
        }
        code = compile(text_of(snippet, kind), str(FOLDER / f"{snippet}.py"), "exec")
        with _amp_for_the_run(device):
            exec(code, self.names)
        self.watch.look(self.model)
        self.optimizer: Any = self.names["optimizer"]
        self.stepped: list[Tensor] = [
            param.detach() for group in self.optimizer.param_groups for param in group["params"]
        ]

    def weights(self) -> Tensor:
        """Return the model's weights as one vector in float32."""
        return torch.cat([p.detach().reshape(-1).float().cpu() for p in self.model.parameters()])

    def moments(self) -> list[str]:
        """Return the names under which the optimizer remembers gradients."""
        known = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        state = self.optimizer.state[self.optimizer.param_groups[0]["params"][0]]
        return [key for key in known if key in state]

    def state(self, key: str) -> Tensor:
        """Return what the optimizer remembers under a name, of all parameters as one vector."""
        states = [
            self.optimizer.state[param]
            for group in self.optimizer.param_groups
            for param in group["params"]
        ]
        return torch.cat([state[key].detach().reshape(-1).float().cpu() for state in states])

    @torch.no_grad()
    def loss(self) -> float:
        """Return the model's mean loss, computed in float32."""
        model = type(self.model)(Watch())
        model.load_state_dict({k: v.float().cpu() for k, v in self.model.state_dict().items()})
        model.eval()
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in self.batches]
        return float(torch.stack(losses).mean())
