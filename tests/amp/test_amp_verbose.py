"""`verbose=True`: one line for each tensor that is cast at the boundary of a listed function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from apex_mp import amp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16 = torch.float16


class Net(nn.Module):
    """The network of the old tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)
        self.fc1, self.fc2 = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(x, dim=1)


IMAGES = torch.ones(2, 1, 6, 6)


def train_step(model: nn.Module, handle: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = F.nll_loss(model(IMAGES), torch.tensor([0, 1]))
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_network_prints_what_it_printed(
    capsys: pytest.CaptureFixture[str], iterations: int
) -> None:
    """Two weights and two biases a kind of layer, and the images: ReLU gives half to the others.

    All lines of a call are equal, so their order does not show.
    """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = amp.init(device_type="cpu", verbose=True)
    for _ in range(iterations):
        train_step(model, handle, optimizer)
        assert Counter(capsys.readouterr().out.splitlines()) == {
            "Float->Half (conv2d)": 5,
            "Float->Half (linear)": 4,
            "Half->Float (log_softmax)": 1,
        }


LINES: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "in order": (lambda h, s: F.linear(s, h), ["Float->Half (linear)"]),
    "softmax": (lambda h, s: F.softmax(h, 1), ["Half->Float (softmax)"]),
    "cat": (lambda h, s: torch.cat([h, s]), ["Half->Float (cat)"]),
    "operator": (lambda h, s: h + s, ["Half->Float (__add__)"]),
    "reversed": (lambda h, s: 2.0**h, ["Half->Float (__rpow__)"]),
    "in place": (lambda h, s: h.clone().add_(s), ["Float->Half (add_)"]),
    "matmul": (lambda h, s: h @ s, ["Float->Half (__matmul__)"]),
    "sum": (lambda h, s: h.sum(), ["Half->Float (sum)"]),
    "cpu": (lambda h, s: h.cpu(), ["Half->Float (cpu)"]),
    "loss": (lambda h, s: F.mse_loss(h, s), ["Half->Float (mse_loss)"]),
    "normalize": (lambda h, s: F.normalize(h), ["Half->Float (normalize)"]),
    "no mixture": (lambda h, s: (h + h, s + s, h == h), []),
    "no cast": (lambda h, s: (F.linear(h, h), F.softmax(s, 1), F.relu(h)), []),
    "the user's own": (lambda h, s: (h.float(), s.half(), s.to(F16), h.type(torch.float32)), []),
    "float64": (lambda h, s: (F.linear(s.double(), s.double()), F.softmax(s.double(), 1)), []),
    "bf16": (lambda h, s: F.softmax(s.bfloat16(), 1), []),
}


@pytest.mark.parametrize(("function", "lines"), LINES.values(), ids=LINES)
def test_a_line_names_the_function_and_the_cast(
    capsys: pytest.CaptureFixture[str],
    function: Callable[[Tensor, Tensor], Any],
    lines: list[str],
) -> None:
    amp.init(device_type="cpu", verbose=True)
    function(torch.rand(3, 3).half(), torch.rand(3, 3))
    assert capsys.readouterr().out.splitlines() == lines
