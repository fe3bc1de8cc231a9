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

    All lines of a call are equal, so their order cannot be told.
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


def test_a_layer_prints_weight_bias_and_input_and_in_a_second_call_the_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x)
            print("again")
            return self.layer(x)

    amp.init(device_type="cpu", verbose=True)
    Twice()(torch.ones(2, 3))
    line = "Float->Half (linear)\n"
    assert capsys.readouterr().out == line * 3 + "again\n" + line


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


def test_recurrent_layers_name_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    amp.init(device_type="cpu", verbose=True)
    nn.LSTM(3, 4)(torch.ones(2, 1, 3))  # Four weights, the input, two states.
    assert Counter(capsys.readouterr().out.splitlines()) == {"Float->Half (lstm)": 7}
    nn.GRUCell(3, 4)(torch.ones(1, 3))
    assert Counter(capsys.readouterr().out.splitlines()) == {"Float->Half (gru_cell)": 6}


def test_bf16_has_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    amp.init(device_type="cpu", verbose=True, dtype=torch.bfloat16)
    F.softmax(torch.ones(2, 2) @ torch.ones(2, 2), 1)
    assert capsys.readouterr().out.splitlines() == [
        *["Float->BFloat16 (__matmul__)"] * 2,
        "BFloat16->Float (softmax)",
    ]


def test_without_verbose_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    handle = amp.init(device_type="cpu")
    train_step(model, handle, torch.optim.SGD(model.parameters(), lr=0.1))
    assert capsys.readouterr().out == ""


def test_backward_and_optimizer_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    amp.init(device_type="cpu", verbose=True)
    loss = model(IMAGES).sum()
    capsys.readouterr()
    loss.backward()
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_verbose_computes_what_it_computes_without() -> None:
    results = []
    for verbose in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Softmax(1))
        handle = amp.init(device_type="cpu", verbose=verbose)
        out = model(IMAGES)
        out.square().sum().backward()
        handle._deactivate()
        results.append([out.detach(), *[param.grad for param in model.parameters()]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_compiled_code_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    amp.init(device_type="cpu", verbose=True)
    model = torch.compile(Net(), backend="aot_eager", fullgraph=True)
    assert model(IMAGES).dtype is torch.float32
    assert capsys.readouterr().out == ""
