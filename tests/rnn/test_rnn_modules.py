"""apex_mp.RNN as modules: what they are built of, what they refuse, cells and weights of others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rnn_cases import IN_TORCH, KINDS, PROJECTED, in_torch
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn_rnn
from torch.nn.utils.rnn import pack_sequence

import apex_mp
from apex_mp.RNN import RNNBackend, cells, models

pytestmark = [
    # torch's words, once in a process, about torch's choice.
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    # Of cuDNN, where weights are computed.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]


F64 = torch.float64


# Weights.

OF_A_CELL = {
    "LSTM": {"w_ih": (20, 3), "w_hh": (20, 5), "b_ih": (20,), "b_hh": (20,)},
    "GRU": {"w_ih": (15, 3), "w_hh": (15, 5), "b_ih": (15,), "b_hh": (15,)},
    "ReLU": {"w_ih": (5, 3), "w_hh": (5, 5), "b_ih": (5,), "b_hh": (5,)},
    "Tanh": {"w_ih": (5, 3), "w_hh": (5, 5), "b_ih": (5,), "b_hh": (5,)},
    "mLSTM": {
        **{"w_ih": (20, 3), "w_hh": (20, 5), "b_ih": (20,), "b_hh": (20,)},
        **{"w_mih": (5, 3), "w_mhh": (5, 5)},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_have_the_names_and_shapes_of_old_checkpoints(kind: str) -> None:
    model = KINDS[kind](3, 5, 2)
    above = {**OF_A_CELL[kind], "w_ih": (OF_A_CELL[kind]["w_ih"][0], 5)}
    if kind == "mLSTM":
        above["w_mih"] = (5, 5)
    expected = {f"rnns.0.{name}": shape for name, shape in OF_A_CELL[kind].items()}
    expected |= {f"rnns.1.{name}": shape for name, shape in above.items()}
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == expected
    checkpoint = {name: torch.randn(shape) for name, shape in expected.items()}
    model.load_state_dict(checkpoint, strict=True)
    assert_same_bits(model.rnns[1].w_hh, checkpoint["rnns.1.w_hh"])


@pytest.mark.parametrize("kind", PROJECTED)
def test_a_projection_adds_w_ho_and_narrows_what_sees_h(kind: str) -> None:
    cell = KINDS[kind](3, 5, 2, False, output_size=2).rnns[1]
    shapes = {name: tuple(p.shape) for name, p in cell.named_parameters()}
    gates = OF_A_CELL[kind]["w_ih"][0]
    expected = {"w_ih": (gates, 2), "w_hh": (gates, 2), "w_ho": (2, 5)}
    if kind == "mLSTM":
        expected |= {"w_mih": (2, 2), "w_mhh": (2, 2)}
    assert shapes == expected
    assert cell.b_ih is cell.b_hh is None


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_layers": 0}, r"num_layers is 0; it must be an int of 1 or more"),
        ({"num_layers": 1.0}, r"num_layers is 1\.0; it must be an int"),
        ({"input_size": -1}, r"input_size is -1; it must be an int of 1 or more"),
        ({"hidden_size": "5"}, r"hidden_size is '5'; it must be an int of 1 or more"),
        ({"dropout": 1}, r"dropout is 1; it must be a number in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout is -0\.1; it must be a number in \[0, 1\)"),
        ({"dropout": "a"}, r"dropout is 'a'; it must be a number in \[0, 1\)"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_argument_is_named_with_its_value_and_the_wish(
    kind: str, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        KINDS[kind](**{"input_size": 3, "hidden_size": 5, "num_layers": 2, **arguments})


@pytest.mark.parametrize(
    ("x", "error", "sentence"),
    [
        (torch.zeros(6, 3), ValueError, r"input has shape \[6, 3\]; it must have three dimensions"),
        (torch.zeros(6, 2, 4), ValueError, r"input has 4 features; this layer takes 3"),
        (torch.zeros(0, 2, 3), ValueError, r"input has no time step; it needs one or more"),
        (
            torch.zeros(6, 2, 3).double(),
            ValueError,
            r"input is torch\.float64, the weights are tor",
        ),
        (
            pack_sequence([torch.zeros(6, 3)]),
            TypeError,
            r"PackedSequence, which these layers do no",
        ),
    ],
    ids=["dimensions", "features", "no step", "dtype", "packed"],
)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_input_is_refused(
    kind: str, bidirectional: bool, x: Any, error: type[Exception], sentence: str
) -> None:
    model = KINDS[kind](3, 5, 2, bidirectional=bidirectional)
    with pytest.raises(error, match=sentence):
        model(x)


def lstm_cell(input_size: int, output_size: int | None = None) -> RNNBackend.RNNCell:
    return RNNBackend.RNNCell(4, input_size, 5, models.LSTMCell, 2, True, output_size)


SHARED = lstm_cell(5)


@pytest.mark.parametrize(
    ("layers", "number", "error", "sentence"),
    [
        ([lstm_cell(3)], 2, ValueError, r"inputRNN has 1 layers, num_layers is 2"),
        (
            [lstm_cell(3), lstm_cell(4)],
            2,
            ValueError,
            r"inputRNN\[1\] takes 4 features, inputRNN\[",
        ),
        ([SHARED, SHARED], 2, ValueError, r"inputRNN has a layer twice; each needs a hidden state"),
        (
            [lstm_cell(3), RNNBackend.RNNCell(3, 5, 5, models.GRUCell, 1)],
            *(2, ValueError, r"inputRNN\[1\] has 1 hidden states, inputRNN\[0\] has 2"),
        ),
        (nn.LSTM(3, 5), 1, TypeError, r"inputRNN is LSTM\(3, 5\); it must be an RNNCell or a list"),
        ([nn.LSTMCell(3, 5)], 1, TypeError, r"it must be an RNNCell or a list of RNNCells"),
    ],
)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_that_do_not_fit_are_refused(
    layers: Any, number: int, error: type[Exception], sentence: str, bidirectional: bool
) -> None:
    with pytest.raises(error, match=sentence):
        models.toRNNBackend(layers, number, bidirectional)


# Layers and cells of the user's own.


def minimal_gated_unit(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    """A cell that is not ours, with two gates."""
    (forget, new), (forget_h, new_h) = (
        nn.functional.linear(*each).chunk(2, -1) for each in ((x, w_ih, b_ih), (h, w_hh, b_hh))
    )
    gate = (forget + forget_h).sigmoid()
    return (1 - gate) * h + gate * (new + new_h).tanh()


@pytest.mark.parametrize("dtype", [torch.float16, F64])
def test_a_function_may_be_the_cell(dtype: torch.dtype, device: torch.device) -> None:
    seen = set()

    def unit(x: Tensor, h: Tensor, *weights: Tensor, **biases: Tensor) -> Tensor:
        seen.update({tensor.dtype for tensor in (x, h, *weights, *biases.values())})
        return minimal_gated_unit(x, h, *weights, **biases)

    cell = RNNBackend.RNNCell(2, 3, 5, unit, 1, bias=True)
    model = models.toRNNBackend(cell, 2, True, 0.5).to(device, dtype)
    output, (hidden,) = model(torch.randn(6, 2, 3, device=device, dtype=dtype))
    assert output.dtype is dtype
    assert seen == {dtype}
    assert (output.shape, hidden.shape) == ((6, 2, 10), (2, 2, 10))
    output.sum().backward()
    assert all(param.grad.any() for param in model.parameters())


# What cuDNN wants.


@pytest.fixture
def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what cuDNN would be given to lay out, without a GPU."""
    given: list[Any] = []

    def flatten(weights: list[Tensor], *sizes: Any) -> None:
        given.append(([weight.data_ptr() for weight in weights], *sizes))

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
    monkeypatch.setattr(cudnn_rnn, "get_cudnn_mode", lambda mode: mode)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten, raising=False)
    return given


@pytest.mark.cpu_only
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [*IN_TORCH, "projected"])
def test_cudnn_is_given_the_weights_to_lay_out_as_by_torch(
    kind: str, bias: bool, as_if_on_cuda: list[Any]
) -> None:
    options = {"output_size": 2} if kind == "projected" else {}
    kind = "LSTM" if options else kind
    model = KINDS[kind](3, 5, 1, bias, **options)
    assert len(as_if_on_cuda) == 1
    layer = in_torch(model, kind)
    as_if_on_cuda.clear()
    layer.flatten_parameters()
    theirs, *sizes = as_if_on_cuda.pop()
    model.double()
    ours, *our_sizes = as_if_on_cuda.pop()
    assert our_sizes == sizes
    names = {p.data_ptr(): name for name, p in model.rnns[0].named_parameters()}
    order = [n for n in ("w_ih", "w_hh", "b_ih", "b_hh", "w_ho") if n in names.values()]
    assert [names[address] for address in ours] == order
    assert len(theirs) == len(ours)


@pytest.fixture
def as_apex() -> Iterator[Any]:
    apex_mp.install_as_apex()
    yield importlib.import_module("apex")
    apex_mp.uninstall_as_apex()


def test_apex_has_them_under_the_old_names(as_apex: Any) -> None:
    for kind, ours in KINDS.items():
        assert getattr(as_apex.RNN, kind) is getattr(as_apex.RNN.models, kind) is ours
    assert as_apex.RNN.RNNBackend.stackedRNN is RNNBackend.stackedRNN
    assert as_apex.RNN.RNNBackend.bidirectionalRNN is RNNBackend.bidirectionalRNN
    assert as_apex.RNN.RNNBackend.RNNCell is RNNBackend.RNNCell
    assert as_apex.RNN.cells.mLSTMRNNCell is cells.mLSTMRNNCell
    assert as_apex.RNN.cells.mLSTMCell is cells.mLSTMCell
    names: dict[str, Any] = {}
    exec("from apex import RNN\nfrom apex.RNN.models import *", names)
    model = names["RNN"].models.mLSTM(3, 5, 1)
    assert isinstance(model, names["stackedRNN"])
    cell = names["RNNCell"](4, 3, 5, names["LSTMCell"], 2, True)
    assert isinstance(
        names["toRNNBackend"](cell, 2, bidirectional=True), RNNBackend.bidirectionalRNN
    )


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_with_one_layer_is_warned_of(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"dropout is 0\.5 and num_layers is 1") as told:
        KINDS[kind](3, 5, 1, dropout=0.5)
    assert told[0].filename == __file__
