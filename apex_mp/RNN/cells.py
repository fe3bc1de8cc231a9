"""The multiplicative LSTM of Krause et al., "Multiplicative LSTM for sequence modelling", 2016."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from apex_mp.RNN._cell import RNNCell, Weights
from apex_mp.RNN._steps import lstm_update


class mLSTMRNNCell(RNNCell):
    """One layer of a multiplicative LSTM, whose gates use m = (w_mih x) * (w_mhh h) in place of h.

    Products with the input are computed for all time steps at once, the rest step by step, because
    torch has no such recurrence.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the cell.
        bias: Have biases b_ih and b_hh [False].
        output_size: As of `RNNCell`; m has as many features [None: `hidden_size`].

    Attributes:
        w_mih: (output_size, input_size), beside the attributes of `RNNCell`.
        w_mhh: (output_size, output_size).
    """

    w_mih: Tensor
    w_mhh: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self._add("w_mih", self.output_size, self.input_size)
        self._add("w_mhh", self.output_size, self.output_size)
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> mLSTMRNNCell:
        """Return a cell of the same sizes with weights of its own; see `RNNCell.new_like`."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(size, self.hidden_size, self.bias, self.output_size)

    def _weights(self) -> Weights:
        """Return the present weights."""
        return super()._weights()._replace(w_mih=self.w_mih, w_mhh=self.w_mhh)

    def _is_ours(self) -> bool:
        return True

    def _run(
        self,
        input: Tensor,  # noqa: A002
        hidden: list[Tensor],
        weights: Weights,
    ) -> tuple[Tensor, list[Tensor]]:
        h, c = hidden
        w_mih, w_mhh = cast(tuple[Tensor, Tensor], weights[-2:])
        # For all steps at once, as they do not depend on h.
        gates = functional.linear(input, weights.w_ih, weights.b_ih)
        factors = functional.linear(input, w_mih)
        outputs = []
        for gate, factor in zip(gates, factors, strict=True):
            h, c = _step(gate, factor, h, c, weights.w_hh, w_mhh, weights.b_hh)
            if weights.w_ho is not None:
                h = functional.linear(h, weights.w_ho)
            outputs.append(h)
        return torch.stack(outputs), [h, c]


def mLSTMCell(
    input: Tensor,  # noqa: A002
    hidden: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    w_mih: Tensor,
    w_mhh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one step of a multiplicative LSTM.

    Args:
        input: (batch, input_size).
        hidden: h (batch, output_size) and c (batch, hidden_size).
        w_ih: (4 * hidden_size, input_size).
        w_hh: (4 * hidden_size, output_size).
        w_mih: (output_size, input_size).
        w_mhh: (output_size, output_size).
        b_ih: (4 * hidden_size) [None].
        b_hh: (4 * hidden_size) [None].

    Returns:
        The new h, before a projection, and c.
    """
    h, c = hidden
    gates = functional.linear(input, w_ih, b_ih)
    return _step(gates, functional.linear(input, w_mih), h, c, w_hh, w_mhh, b_hh)


def _step(
    gates: Tensor,
    factor: Tensor,
    h: Tensor,
    c: Tensor,
    w_hh: Tensor,
    w_mhh: Tensor,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Take one step from the products of the input with w_ih (`gates`) and w_mih (`factor`)."""
    m = factor * functional.linear(h, w_mhh)
    return lstm_update(gates + functional.linear(m, w_hh, b_hh), c)
