"""apex_mp.RNN computes what torch.nn does, and the multiplicative LSTM of its paper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rnn_cases import (
    IN_TORCH,
    KINDS,
    PROJECTED,
    gradients,
    in_torch,
    mixed_sum,
    multiplicative_lstm,
    states_of,
    torchs_name,
)
from tolerances import (
    TOLERANCES,
    TRAJECTORY_TOLERANCES,
    assert_near,
)
from torch import Tensor, nn

from apex_mp import RNN
from apex_mp.RNN import RNNBackend, cells, models

pytestmark = [
    # torch's words, once in a process, about torch's choice.
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    # Of cuDNN, where weights are computed.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]
F64 = torch.float64
SIZES = (3, 5)


def sequence(device: torch.device, dtype: torch.dtype = F64, steps: int = 6) -> Tensor:
    return torch.randn(steps, 2, SIZES[0], dtype=F64).to(device, dtype).requires_grad_()


def near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is expected.dtype
    assert_near(actual, expected, TRAJECTORY_TOLERANCES[actual.dtype])


def same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], compare: Any = near) -> None:
    assert len(ours) == len(theirs) > 2
    for name, gradient in ours.items():
        compare(gradient, theirs[torchs_name(name) if "." in name else name])


# The layers of torch.


def equals_torch(kind: str, model: Any, x: Tensor) -> None:
    theirs = in_torch(model, kind)
    output, hidden = model(x)
    expected, state = theirs(x)
    near(output, expected)
    assert isinstance(hidden, list)
    states = states_of(state)
    for one, other in zip(hidden, states, strict=True):
        near(one, other)
    same_gradients(
        gradients(mixed_sum(output, *hidden), model, x),
        gradients(mixed_sum(expected, *states), theirs, x),
    )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", IN_TORCH)
def test_layers_equal_those_of_torch(
    kind: str, layers: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    model = KINDS[kind](*SIZES, layers, bias).to(device, dtype)
    equals_torch(kind, model, sequence(device, dtype))


@pytest.mark.parametrize("kind", IN_TORCH)
def test_batch_first_is_that_of_torch(kind: str, device: torch.device) -> None:
    model = KINDS[kind](*SIZES, 2, True, True).to(device, F64)
    theirs = in_torch(model, kind, batch_first=True)
    x = sequence(device).transpose(0, 1)
    output, hidden = model(x)
    expected, state = theirs(x)
    near(output, expected)
    for one, other in zip(hidden, states_of(state), strict=True):
        near(one, other)


@pytest.mark.parametrize("kind", IN_TORCH)
def test_two_directions_are_two_layers_of_torch(kind: str, device: torch.device) -> None:
    model = KINDS[kind](*SIZES, 2, bidirectional=True).to(device, F64)
    ahead, back = (in_torch(direction, kind) for direction in model.rnns)
    x = sequence(device)
    output, hidden = model(x)
    one, one_state = ahead(x)
    other, other_state = back(x.flip(0))
    near(output, torch.cat([one, other.flip(0)], -1))
    assert isinstance(hidden, tuple)
    pairs = zip(states_of(one_state), states_of(other_state), strict=True)
    for ours, pair in zip(hidden, pairs, strict=True):
        near(ours, torch.cat(pair, -1))
    gradient = gradients(mixed_sum(output), model, x)
    expected = gradients(mixed_sum(torch.cat([one, other.flip(0)], -1)), ahead, x)
    near(gradient["fwd.rnns.1.w_hh"], expected["weight_hh_l1"])


@pytest.mark.parametrize("kind", ["ReLU", "Tanh"])
def test_a_projection_of_a_simple_rnn_is_what_the_next_step_sees(
    kind: str, device: torch.device
) -> None:
    model = KINDS[kind](*SIZES, 1, output_size=2).to(device, F64)
    cell = model.rnns[0]
    x = sequence(device)
    h = x.new_zeros(2, 2)
    expected = []
    for step in x:
        gate = step @ cell.w_ih.T + cell.b_ih + h @ cell.w_hh.T + cell.b_hh
        h = (gate.relu() if kind == "ReLU" else gate.tanh()) @ cell.w_ho.T
        expected.append(h)
    output, (hidden,) = model(x)
    near(output, torch.stack(expected))
    near(hidden[0], h)


# The multiplicative LSTM.


def paper(model: Any, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return output and hidden state of a model in float64, and the weights they depend on."""
    x, leaves, states = x.detach().double().cpu(), [], []
    for layer in model.rnns:
        weights = {n: p.detach().double().cpu() for n, p in layer.named_parameters()}
        leaves += [weight.requires_grad_() for weight in weights.values()]
        h, c = (torch.zeros(x.size(1), n, dtype=F64) for n in (layer.output_size, 5))
        x, *state = multiplicative_lstm(x, weights, h, c)
        states.append(state)
    return x, [torch.stack(each) for each in zip(*states, strict=True)], leaves


@pytest.mark.parametrize("output_size", [None, 2, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_multiplicative_lstm_is_that_of_the_paper(
    layers: int, bias: bool, output_size: int | None, device: torch.device
) -> None:
    model = RNN.mLSTM(*SIZES, layers, bias, output_size=output_size).to(device, F64)
    x = sequence(device)
    output, hidden = model(x)
    expected, states, leaves = paper(model, x)
    near(output.cpu(), expected)
    for one, other in zip(hidden, states, strict=True):
        near(one.cpu(), other)
    found = torch.autograd.grad(mixed_sum(output, *hidden), [*model.parameters()])
    wanted = torch.autograd.grad(mixed_sum(expected, *states), leaves)
    for one, other in zip(found, wanted, strict=True):
        near(one.cpu(), other)


def test_a_step_of_the_multiplicative_lstm_is_a_function_too(device: torch.device) -> None:
    cell = cells.mLSTMRNNCell(*SIZES, True).to(device, F64)
    x, h, c = sequence(device, steps=1), *torch.randn(2, 2, 5, dtype=F64, device=device)
    weights = dict(cell.named_parameters())
    found = cells.mLSTMCell(x[0], [h, c], **weights)
    cpu = {name: weight.cpu() for name, weight in weights.items()}
    _, *expected = multiplicative_lstm(x.cpu(), cpu, h.cpu(), c.cpu())
    for one, other in zip(found, expected, strict=True):
        near(one.cpu(), other)


# Half precision.


def in_float64(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return copy.deepcopy(model).double(), x.detach().double().requires_grad_()


@pytest.mark.cpu_only
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float16_on_a_cpu_is_rounded_once(kind: str, projected: bool) -> None:
    if projected and kind not in PROJECTED:
        return
    options = {"output_size": 2} if projected else {}
    model = KINDS[kind](*SIZES, 1, **options).half()
    x = sequence(torch.device("cpu"), torch.float16)
    exact, exact_x = in_float64(model, x)
    output, hidden = model(x)
    expected, expected_hidden = exact(exact_x)
    for one, other in zip([output, *hidden], [expected, *expected_hidden], strict=True):
        assert_near(one, other)
    found = gradients(output.square().sum(), model, x)
    # The gradient that comes in is of rounded outputs.
    wanted = torch.autograd.grad(
        expected, [*exact.parameters(), exact_x], 2 * output.detach().double()
    )
    for one, other in zip(found.values(), wanted, strict=True):
        assert_near(one, other, TOLERANCES[torch.float16])


# Steps, both ways and one at a time.


@pytest.mark.parametrize("kind", KINDS)
def test_collected_hidden_states_are_those_after_each_step(kind: str, device: torch.device) -> None:
    model = KINDS[kind](*SIZES, 2).to(device, F64)
    x = sequence(device)
    output, hidden = model(x, collect_hidden=True)
    assert len(hidden) == (2 if "LSTM" in kind else 1)
    model.reset_hidden(2)
    for number, step in enumerate(x):
        one, states = model(step.unsqueeze(0))
        near(output[number], one[0])
        for collected, state in zip(hidden, states, strict=True):
            near(collected[number], state)
    assert len(hidden[0]) == 6


@pytest.mark.parametrize("collect_hidden", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reverse_goes_from_the_last_step_to_the_first(
    kind: str, collect_hidden: bool, device: torch.device
) -> None:
    model = KINDS[kind](*SIZES, 2).to(device, F64)
    x = sequence(device)
    output, hidden = model(x, collect_hidden, reverse=True)
    model.reset_hidden(2)
    expected, states = model(x.flip(0), collect_hidden)
    near(output, expected.flip(0))
    for one, other in zip(hidden, states, strict=True):
        if collect_hidden:
            near(torch.stack(one), torch.stack(other).flip(0))
        else:
            near(one, other)


def test_a_cell_takes_one_step(device: torch.device) -> None:
    cell = RNNBackend.RNNCell(4, *SIZES, models.LSTMCell, bias=True).to(device, F64)
    theirs = nn.LSTMCell(*SIZES, device=device, dtype=F64)
    theirs.load_state_dict(
        {torchs_name(f"rnns.0.{n}")[:-3]: value for n, value in cell.state_dict().items()}
    )
    x = sequence(device)
    state = None
    for step in x:
        state = theirs(step, state)
        for one, other in zip(cell(step), state, strict=True):
            near(one, other)
