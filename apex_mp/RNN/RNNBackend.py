"""Stacks of recurrent layers, in one direction and in two."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from apex_mp.RNN._cell import RNNCell, at_least_one

__all__ = ["RNNCell", "bidirectionalRNN", "stackedRNN"]


class _Several(nn.Module):
    """Methods that call the same method of all modules in `rnns`."""

    rnns: Iterable[Any]  # A ModuleList.

    def reset_parameters(self) -> None:
        """Draw the weights of all layers anew; see `RNNCell.reset_parameters`."""
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Have a hidden state for `bsz` sequences: zeros, unless there is one for as many."""
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut the hidden state off from the graph; its values stay.

        Raises:
            RuntimeError: There is none yet.
        """
        for rnn in self.rnns:
            rnn.detach_hidden()

    def reset_hidden(self, bsz: int) -> None:
        """Have a hidden state of zeros for `bsz` sequences."""
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """Do what `reset_hidden` does; see `RNNCell.init_inference`."""
        for rnn in self.rnns:
            rnn.init_inference(bsz)


class stackedRNN(_Several):
    """Layers one upon the other, each with a hidden state that lasts between calls.

    Args:
        inputRNN: The lowest layer, from which the others are made, or a list of all layers.
        num_layers: How many [1].
        dropout: Part of the features that are dropped between layers in training, in [0, 1) [0].
        batch_first: Whether input and output are (batch, sequence, features) [False].

    Raises:
        TypeError: `inputRNN` is neither an RNNCell nor a list of such.
        ValueError: `num_layers` is below 1 or not the list's length, `dropout` is not in [0, 1),
            a layer is in the list twice, or layers do not fit together.
    """

    def __init__(
        self,
        inputRNN: RNNCell | Sequence[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        at_least_one("num_layers", num_layers)
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout!r}; it must be a number in [0, 1)")
        self.dropout = dropout
        self.batch_first = batch_first
        self.rnns = nn.ModuleList(_layers(inputRNN, num_layers))
        self.nLayers = num_layers

    def forward(
        self,
        input: Tensor,  # noqa: A002
        collect_hidden: bool = False,
        reverse: bool = False,
    ) -> tuple[Tensor, list[Any]]:
        """Run all layers over a sequence, from their hidden states on.

        Args:
            input: (sequence, batch, features), or as `batch_first` says.
            collect_hidden: Return the hidden state after each step [False].
            reverse: Go from the last step to the first [False].

        Returns:
            The output of the highest layer, in the order of the input, and a list of the tensors
            of the hidden state, (layers, batch, features) each: h, and c of an LSTM, after the step
            that was taken last. With `collect_hidden` there is a list of such for each tensor: item
            t is what step t left. Layers of unequal sizes leave a tuple of tensors
            (batch, features) instead.

        Raises:
            TypeError: The input is a PackedSequence, or `collect_hidden` is no bool.
            ValueError: The input has no three dimensions, or is one that `RNNCell` refuses.
        """
        _check(input, collect_hidden)
        sequence = input.transpose(0, 1) if self.batch_first else input
        if reverse:
            sequence = sequence.flip(0)
        layers: list[list[tuple[Tensor, ...]]] = []  # [layer][step][h, c]
        for number, layer in enumerate(self.rnns):
            if number > 0:
                sequence = functional.dropout(sequence, self.dropout, self.training)
            sequence, hidden = _run(layer, sequence, collect_hidden)
            layers.append(hidden)
        hiddens = [
            [_stacked(states) for states in zip(*step, strict=True)]
            for step in zip(*layers, strict=True)
        ]  # [step][h, c]
        if reverse:
            sequence = sequence.flip(0)
            hiddens.reverse()
        output = sequence.transpose(0, 1) if self.batch_first else sequence
        return output, [
            [*each] for each in zip(*hiddens, strict=True)
        ] if collect_hidden else hiddens[0]


class bidirectionalRNN(_Several):
    """Two stacks, one in each direction, whose outputs are put together.

    They are independent: no layer sees the other direction, as those of `torch.nn` above the first
    do. Their parameters have two names each, `fwd.` and `rnns.0.`, `bckwrd.` and `rnns.1.`, as in
    old checkpoints.

    Args:
        inputRNN: As of `stackedRNN`; the other direction has layers of the same kinds.
        num_layers: Layers of each direction [1].
        dropout: As of `stackedRNN` [0].
        batch_first: As of `stackedRNN` [False].

    Raises:
        TypeError: As of `stackedRNN`.
        ValueError: As of `stackedRNN`.
    """

    def __init__(
        self,
        inputRNN: RNNCell | Sequence[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        other = (
            inputRNN.new_like()
            if isinstance(inputRNN, RNNCell)
            else [layer.new_like() for layer in inputRNN]
        )
        self.bckwrd = stackedRNN(other, num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(
        self,
        input: Tensor,  # noqa: A002
        collect_hidden: bool = False,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Run both stacks over a sequence, from their hidden states on.

        Args:
            input: As of `stackedRNN`.
            collect_hidden: Return the hidden state after each step [False].

        Returns:
            The output, with twice as many features, those of the forward direction first; and a
            tuple of what `stackedRNN` returns a list of, put together likewise. The backward
            direction has come to its hidden state at the first step of the sequence.

        Raises:
            TypeError: As of `stackedRNN`.
            ValueError: As of `stackedRNN`.
        """
        output, hidden = self.fwd(input, collect_hidden)
        back_output, back_hidden = self.bckwrd(input, collect_hidden, reverse=True)
        return torch.cat([output, back_output], -1), tuple(
            _side_by_side(*pair) for pair in zip(hidden, back_hidden, strict=True)
        )


def _layers(inputRNN: RNNCell | Sequence[RNNCell], num_layers: int) -> list[RNNCell]:
    """Return `num_layers` layers that fit together, made of one or given."""
    if isinstance(inputRNN, RNNCell):
        above = [inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1)]
        return [inputRNN, *above]
    if not isinstance(inputRNN, (list, tuple)) or not all(
        isinstance(layer, RNNCell) for layer in inputRNN
    ):
        raise TypeError(f"inputRNN is {inputRNN!r}; it must be an RNNCell or a list of RNNCells")
    layers = [*inputRNN]
    if len(layers) != num_layers:
        raise ValueError(f"inputRNN has {len(layers)} layers, num_layers is {num_layers}")
    if len(set(layers)) < len(layers):
        raise ValueError("inputRNN has a layer twice; each needs a hidden state of its own")
    for number, (below, layer) in enumerate(itertools.pairwise(layers), 1):
        if layer.input_size != below.output_size:
            raise ValueError(
                f"inputRNN[{number}] takes {layer.input_size} features, inputRNN[{number - 1}] "
                f"gives {below.output_size}; they must be equal"
            )
        if layer.n_hidden_states != below.n_hidden_states:
            raise ValueError(
                f"inputRNN[{number}] has {layer.n_hidden_states} hidden states, "
                f"inputRNN[{number - 1}] has {below.n_hidden_states}; they must be equal"
            )
    return layers


def _check(input: Tensor, collect_hidden: bool) -> None:  # noqa: A002
    if not isinstance(collect_hidden, int):
        raise TypeError(
            f"collect_hidden is a {type(collect_hidden).__name__}; it must be a bool: these layers "
            "keep their hidden state, and are given none"
        )
    if isinstance(input, PackedSequence):
        raise TypeError(
            "input is a PackedSequence, which these layers do not take; give padded sequences, or "
            "use torch.nn.LSTM, GRU or RNN"
        )
    if input.dim() != 3:
        raise ValueError(
            f"input has shape {[*input.shape]}; it must have three dimensions: sequence, batch, "
            "features"
        )


def _run(
    layer: nn.Module,
    input: Tensor,  # noqa: A002
    collect_hidden: bool,
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Return the output of a layer, and its hidden state after each step or after the last."""
    # A class of the user's that computes something else takes one step at a time.
    takes_sequences = type(layer).forward is RNNCell.forward
    if takes_sequences and not collect_hidden:
        output, hidden = layer(input)
        return output, [hidden]
    steps = [layer(step) for step in input]
    output = torch.stack([hidden[0] for hidden in steps])
    return output, steps if collect_hidden else steps[-1:]


def _stacked(states: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Put one tensor of each layer together, if they are of one size."""
    return torch.stack(states) if len({state.shape for state in states}) == 1 else states


def _side_by_side(one: Any, other: Any) -> Any:
    """Put two directions together: tensors, or lists and tuples of such."""
    if isinstance(one, Tensor):
        return torch.cat([one, other], -1)
    return type(one)(_side_by_side(*pair) for pair in zip(one, other, strict=True))
