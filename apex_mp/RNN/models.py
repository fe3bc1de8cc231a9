"""LSTM, GRU, ReLU, Tanh and mLSTM: stacks of layers by the arguments of apex."""

from __future__ import annotations

from collections.abc import Sequence

from apex_mp.core.log import warn
from apex_mp.RNN._steps import GRUCell, LSTMCell, RNNReLUCell, RNNTanhCell
from apex_mp.RNN.cells import mLSTMCell, mLSTMRNNCell
from apex_mp.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = [
    "GRU",
    "LSTM",
    "GRUCell",
    "LSTMCell",
    "RNNCell",
    "RNNReLUCell",
    "RNNTanhCell",
    "ReLU",
    "Tanh",
    "bidirectionalRNN",
    "mLSTM",
    "mLSTMCell",
    "mLSTMRNNCell",
    "stackedRNN",
    "toRNNBackend",
]


def toRNNBackend(
    inputRNN: RNNCell | Sequence[RNNCell],
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    batch_first: bool = False,
) -> stackedRNN | bidirectionalRNN:
    """Return a stack of layers: `stackedRNN`, or `bidirectionalRNN` of two.

    Args:
        inputRNN: The lowest layer, from which the others are made, or a list of all layers.
        num_layers: How many layers in each direction.
        bidirectional: Have two stacks, one in each direction [False].
        dropout: Part of the features that are dropped between layers in training [0].
        batch_first: Whether input and output are (batch, sequence, features) [False].

    Raises:
        TypeError: As of `stackedRNN`.
        ValueError: As of `stackedRNN`.
    """
    kind = bidirectionalRNN if bidirectional else stackedRNN
    return kind(inputRNN, num_layers, dropout, batch_first)


def LSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return an LSTM that keeps its hidden state, h and c, between calls.

    Args:
        input_size: Features of the input.
        hidden_size: Features of h and c.
        num_layers: How many layers in each direction.
        bias: Have biases [True].
        batch_first: Whether input and output are (batch, sequence, features) instead of
            (sequence, batch, features) [False].
        dropout: Part of the features that are dropped between layers in training, in [0, 1) [0].
        bidirectional: Have two stacks, one in each direction [False].
        output_size: Features that h is projected to in each step, `proj_size` of `torch.nn.LSTM`
            [None: `hidden_size`, without a projection].

    Raises:
        ValueError: A size is not an int of 1 or more, or `dropout` is not in [0, 1).
    """
    cell = RNNCell(4, input_size, hidden_size, LSTMCell, 2, bias, output_size)
    return _stack(cell, num_layers, bidirectional, dropout, batch_first)


def GRU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return a GRU that keeps its hidden state between calls; arguments as of `LSTM`.

    Raises:
        ValueError: As of `LSTM`, or `output_size` is not `hidden_size`: a GRU adds to its state,
            which cannot have the size of a projection.
    """
    if output_size not in (None, hidden_size):
        raise ValueError(
            f"GRU: output_size is {output_size}, hidden_size is {hidden_size}; a GRU mixes its old "
            "state with the new one, so they must be equal: put a torch.nn.Linear behind it"
        )
    cell = RNNCell(3, input_size, hidden_size, GRUCell, 1, bias)
    return _stack(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return a simple RNN with ReLU that keeps its hidden state; arguments as of `LSTM`.

    Raises:
        ValueError: As of `LSTM`.
    """
    cell = RNNCell(1, input_size, hidden_size, RNNReLUCell, 1, bias, output_size)
    return _stack(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return a simple RNN with tanh that keeps its hidden state; arguments as of `LSTM`.

    Raises:
        ValueError: As of `LSTM`.
    """
    cell = RNNCell(1, input_size, hidden_size, RNNTanhCell, 1, bias, output_size)
    return _stack(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return a multiplicative LSTM that keeps its hidden state; arguments as of `LSTM`.

    Raises:
        ValueError: As of `LSTM`.
    """
    cell = mLSTMRNNCell(input_size, hidden_size, bias=bias, output_size=output_size)
    return _stack(cell, num_layers, bidirectional, dropout, batch_first)


def _stack(
    cell: RNNCell, num_layers: int, bidirectional: bool, dropout: float, batch_first: bool
) -> stackedRNN | bidirectionalRNN:
    if dropout and num_layers == 1:
        warn(
            f"dropout is {dropout!r} and num_layers is 1; dropout acts between layers only",
            "arguments-without-effect",
            UserWarning,
        )
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
