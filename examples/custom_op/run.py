"""A C++ function of your own that demands float32, in a model that runs in mixed precision.

    python examples/custom_op/run.py        builds row_normalize.cpp, then trains three times

amp knows torch's functions, not yours: what a linear layer hands to yours is in fp16, and yours
refuses it. So say in which precision it runs: by a decorator, or by its name if the code that calls
it is not to be touched. For a function that is fast in fp16 there are `amp.half_function` and
`amp.register_half_function`.

The first run compiles for a few seconds and needs a C++ compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

from apex_mp import amp

FOLDER = Path(__file__).resolve().parent


def as_it_is(x: Tensor) -> Tensor:
    return torch.ops.custom_op.row_normalize(x)


@amp.float_function
def decorated(x: Tensor) -> Tensor:
    return torch.ops.custom_op.row_normalize(x)


def build() -> None:
    """Compile the function, unless that is done, and load it as torch.ops.custom_op."""
    # pip puts ninja beside the interpreter, which is not on everyone's path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    source = str(FOLDER / "row_normalize.cpp")
    cpp_extension.load("custom_op", [source], is_python_module=False)

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return (grad - y * (grad * y).sum(dim=1, keepdim=True)) / x.norm(dim=1, keepdim=True)

    torch.library.register_autograd("custom_op::row_normalize", backward, setup_context=keep)


class Model(nn.Module):
    """Two linear layers, with the function between them."""

    def __init__(self, row_normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.row_normalize = row_normalize
        self.classes = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.row_normalize(self.hidden(x)))


def train(row_normalize: Callable[[Tensor], Tensor]) -> str:
    """Train for a moment in mixed precision, and return how it went."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    labels = (x[:, 0] > x[:, 1]).long()
    model = Model(row_normalize)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    amp_handle = amp.init(device_type="cpu")
    try:
        for _ in range(40):
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except RuntimeError as error:
        return "fails: " + str(error).replace(f"{FOLDER}{os.sep}", "")
    finally:
        amp_handle._deactivate()  # Only because there are three runs here.
    return f"trains: loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def main() -> None:
    build()
    print("as it is          ", train(as_it_is))
    print("decorated         ", train(decorated))
    amp.register_float_function(torch.ops.custom_op, "row_normalize")
    print("registered by name", train(as_it_is))


if __name__ == "__main__":
    main()
