"""A C++ and CUDA function of your own, in a model that runs in mixed precision.

    python examples/custom_op/run.py        builds row_normalize.*, then trains three times

amp knows torch's functions, not yours, and yours may be made for one precision: here, on the CPU
for float32 and on CUDA for float16. So say in which precision it runs: by a decorator, or by its
name if the code that calls it is not to be touched.

| device | file               | takes   | decorator            | by name                       |
| ------ | ------------------ | ------- | -------------------- | ----------------------------- |
| cpu    | row_normalize.cpp  | float32 | `amp.float_function` | `amp.register_float_function` |
| cuda   | row_normalize.cu   | float16 | `amp.half_function`  | `amp.register_half_function`  |

The first run compiles, and needs a C++ compiler; the CUDA function is built where there are a CUDA
toolkit, a torch with CUDA, and a GPU or TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import argparse
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


def row_normalize(x: Tensor) -> Tensor:
    return torch.ops.custom_op.row_normalize(x)


@amp.float_function
def float_row_normalize(x: Tensor) -> Tensor:
    return torch.ops.custom_op.row_normalize(x)


@amp.half_function
def half_row_normalize(x: Tensor) -> Tensor:
    return torch.ops.custom_op.row_normalize(x)


def builds_cuda() -> bool:
    """Return whether there are a toolkit, a torch with CUDA, and GPUs to build for."""
    toolkit = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    return toolkit and ("TORCH_CUDA_ARCH_LIST" in os.environ or torch.cuda.is_available())


def build() -> None:
    """Compile the function, unless that is done, and load it as torch.ops.custom_op."""
    # pip puts ninja beside the interpreter, which is not on everyone's path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    suffixes = [".cpp", *[".cu"] * builds_cuda()]
    sources = [str(FOLDER / f"row_normalize{suffix}") for suffix in suffixes]
    cpp_extension.load("custom_op", sources, is_python_module=False)

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dtype = grad.dtype
        x, y, grad = (each.float() for each in (*ctx.saved_tensors, grad))
        grad_x = (grad - y * (grad * y).sum(dim=1, keepdim=True)) / x.norm(dim=1, keepdim=True)
        return grad_x.to(dtype)

    torch.library.register_autograd("custom_op::row_normalize", backward, setup_context=keep)


class Model(nn.Module):
    """Two linear layers, with the function between them.

    A linear layer hands on float16, which the function takes on CUDA. There it stands behind a
    softplus, which hands on float32.
    """

    def __init__(self, row_normalize: Callable[[Tensor], Tensor], device: str) -> None:
        super().__init__()
        self.activation = nn.Softplus() if device == "cuda" else nn.Identity()
        self.hidden = nn.Linear(4, 16)
        self.row_normalize = row_normalize
        self.classes = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.row_normalize(self.activation(self.hidden(x))))


def train(row_normalize: Callable[[Tensor], Tensor], device: str) -> str:
    """Train for a moment in mixed precision, and return how it went."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, device=device)
    labels = (x[:, 0] > x[:, 1]).long()
    model = Model(row_normalize, device).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    amp_handle = amp.init(device_type=device)
    try:
        for _ in range(40):
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except RuntimeError as error:
        return f"fails: {error}"
    finally:
        amp_handle._deactivate()  # Only because there are three runs here.
    return f"trains: loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default, help=f"[{default}]")
    device = parser.parse_args().device
    build()
    decorated = half_row_normalize if device == "cuda" else float_row_normalize
    register = amp.register_half_function if device == "cuda" else amp.register_float_function
    print("as it is          ", train(row_normalize, device), flush=True)
    print("decorated         ", train(decorated, device), flush=True)
    register(torch.ops.custom_op, "row_normalize")
    print("registered by name", train(row_normalize, device))


if __name__ == "__main__":
    main()
