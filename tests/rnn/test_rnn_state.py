"""The hidden state of apex_mp.RNN: it lasts between calls, and follows the module."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from rnn_cases import KINDS
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor, nn

from apex_mp.RNN import RNNBackend

# Of cuDNN, where weights are computed, or copied.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contig")
F64 = torch.float64


def model_of(kind: str, device: torch.device, **options: Any) -> Any:
    return KINDS[kind](3, 5, 2, **options).to(device, F64)


def sequence(device: torch.device, batch: int = 2) -> Tensor:
    return torch.randn(6, batch, 3, dtype=F64, device=device)


def near(actual: Tensor, expected: Tensor) -> None:
    assert_near(actual, expected, TRAJECTORY_TOLERANCES[F64])


def cells_of(model: nn.Module) -> list[RNNBackend.RNNCell]:
    return [module for module in model.modules() if isinstance(module, RNNBackend.RNNCell)]


def hidden_of(model: nn.Module) -> list[Tensor]:
    states = [state for cell in cells_of(model) for state in cell.hidden]
    assert all(state is not None for state in states)
    return [state for state in states if state is not None]


# It lasts.


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_may_be_cut_in_two(kind: str, device: torch.device) -> None:
    model = model_of(kind, device)
    x = sequence(device)
    expected, last = model(x)
    wanted = torch.autograd.grad(expected.sum(), [*model.parameters()])
    model.reset_hidden(2)
    parts = [model(part) for part in x.split([4, 2])]
    output = torch.cat([part for part, _ in parts])
    near(output, expected)
    for one, other in zip(parts[1][1], last, strict=True):
        near(one, other)
    found = torch.autograd.grad(output.sum(), [*model.parameters()])
    for one, other in zip(found, wanted, strict=True):
        near(one, other)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_at_zeros_for_each_size_of_batch(
    kind: str, bidirectional: bool, device: torch.device
) -> None:
    model = model_of(kind, device, bidirectional=bidirectional)
    first, second = sequence(device), sequence(device, 3)
    model(first)
    output, _ = model(second)
    model.reset_hidden(3)
    assert all(not state.any() and state.size(0) == 3 for state in hidden_of(model))
    assert_same_bits(output, model(second)[0])
    assert not torch.equal(output, model(second)[0])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_detached_it_keeps_its_values_and_lets_go_of_the_graph(
    kind: str, bidirectional: bool, device: torch.device
) -> None:
    model = model_of(kind, device, bidirectional=bidirectional)
    for _ in range(2):
        before = None if cells_of(model)[0].hidden[0] is None else hidden_of(model)
        output, _ = model(sequence(device))
        assert any(state.requires_grad for state in hidden_of(model))
        attached = hidden_of(model)
        model.detach_hidden()
        output.sum().backward()
        for state, other in zip(hidden_of(model), attached, strict=True):
            assert not state.requires_grad
            assert_same_bits(state, other)
        assert before is None or not torch.equal(before[0], attached[0])


# It follows.


@pytest.mark.parametrize("kind", KINDS)
def test_it_follows_the_dtype_of_the_module(kind: str, device: torch.device) -> None:
    model = model_of(kind, device)
    model(sequence(device))
    expected = copy.deepcopy(model)(x := sequence(device))[0]
    output, hidden = model.float()(x.float())
    assert output.dtype is torch.float32
    assert {state.dtype for state in (*hidden, *hidden_of(model))} == {torch.float32}
    assert_near(output, expected, TRAJECTORY_TOLERANCES[torch.float32])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_what_was_computed_without_gradients(
    kind: str, mode: Any, device: torch.device
) -> None:
    model = model_of(kind, device)
    x = sequence(device)
    with mode():
        model(x)
    output, _ = model(x)
    found = torch.autograd.grad(output.sum(), [*model.parameters()])
    model.reset_hidden(2)
    model(x)
    model.detach_hidden()
    wanted = torch.autograd.grad(model(x)[0].sum(), [*model.parameters()])
    for one, other in zip(found, wanted, strict=True):
        near(one, other)


# It is copied.


def reloaded(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded, saved])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_from_its_values_without_the_graph(
    kind: str, bidirectional: bool, copied: Any, device: torch.device
) -> None:
    model = model_of(kind, device, bidirectional=bidirectional)
    x = sequence(device)
    model(x)
    twin = copied(model)
    for one, other in zip(hidden_of(twin), hidden_of(model), strict=True):
        assert_same_bits(one, other.detach())
        assert not one.requires_grad
        assert other.requires_grad
        assert one.data_ptr() != other.data_ptr()
    near(twin(x)[0], model(x)[0])
    twin.detach_hidden()
