"""One time step of each cell, and torch's recurrence that runs it over a whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# The module, not its functions: amp replaces those by casting wrappers.
_VF: Any = torch._VF


def lstm_update(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new h and c of an LSTM.

    Args:
        gates: (batch, 4 * hidden): input, forget, cell and output gates before their sigmoids and
            the tanh.
        c: (batch, hidden).
    """
    write, keep, new, show = gates.chunk(4, 1)
    c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
    return show.sigmoid() * c.tanh(), c


def LSTMCell(
    input: Tensor,  # noqa: A002
    hidden: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one step of an LSTM; h may be a projection, with as many features as `w_hh` takes.

    Args:
        input: (batch, input_size).
        hidden: h (batch, output_size) and c (batch, hidden_size).
        w_ih: (4 * hidden_size, input_size).
        w_hh: (4 * hidden_size, output_size).
        b_ih: (4 * hidden_size) [None].
        b_hh: (4 * hidden_size) [None].

    Returns:
        The new h, before a projection, and c.
    """
    h, c = hidden
    return lstm_update(functional.linear(input, w_ih, b_ih) + functional.linear(h, w_hh, b_hh), c)


def GRUCell(
    input: Tensor,  # noqa: A002
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Return the state after one step of a GRU: `torch.gru_cell`; arguments as of `LSTMCell`."""
    result: Tensor = _VF.gru_cell(input, hidden, w_ih, w_hh, b_ih, b_hh)
    return result


def RNNReLUCell(
    input: Tensor,  # noqa: A002
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Return the state after one step of an RNN with ReLU; arguments as of `LSTMCell`."""
    return (functional.linear(input, w_ih, b_ih) + functional.linear(hidden, w_hh, b_hh)).relu()


def RNNTanhCell(
    input: Tensor,  # noqa: A002
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Return the state after one step of an RNN with tanh; arguments as of `LSTMCell`."""
    return (functional.linear(input, w_ih, b_ih) + functional.linear(hidden, w_hh, b_hh)).tanh()


# The cell, the function of torch._VF for a sequence, and the torch.nn layer with its arguments.
RECURRENCES: dict[Callable[..., Any], tuple[str, str, dict[str, str]]] = {
    LSTMCell: ("lstm", "LSTM", {}),
    GRUCell: ("gru", "GRU", {}),
    RNNReLUCell: ("rnn_relu", "RNN", {"nonlinearity": "relu"}),
    RNNTanhCell: ("rnn_tanh", "RNN", {"nonlinearity": "tanh"}),
}


def run_sequence(
    cell: Callable[..., Any],
    input: Tensor,  # noqa: A002
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run one layer over a sequence by torch's own recurrence: cuDNN's on a GPU.

    Args:
        cell: A key of `RECURRENCES`.
        input: (sequence, batch, input_size).
        hidden: h, and c of an LSTM: (batch, features) each.
        weights: w_ih, w_hh, with biases b_ih, b_hh, with a projection w_ho.
        has_biases: Whether there are biases among the weights.

    Returns:
        The output (sequence, batch, features), and the hidden state after the last step.
    """
    function = getattr(_VF, RECURRENCES[cell][0])
    states = [state.unsqueeze(0) for state in hidden]
    # Only in training does cuDNN's forward save what its backward needs. There is no dropout here.
    training = torch.is_grad_enabled()
    start = states if cell is LSTMCell else states[0]
    output, *states = function(input, start, weights, has_biases, 1, 0.0, training, False, False)
    return output, [state.squeeze(0) for state in states]
