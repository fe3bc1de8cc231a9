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
    """Base class with methods that call the same method of all modules in `rnns`."""

    rnns: Iterable[Any]  # A ModuleList.

    def reset_parameters(self) -> None:
        """Initialize the weights of all layers again; see `RNNCell.reset_parameters`."""
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Make a hidden state of zeros for `bsz` sequences, unless there is one for as many.

        Args:
            bsz: Sequences in the batch.
        """
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Detach the hidden state from the graph; its values stay.

        Raises:
            RuntimeError: There is none yet.
        """
        for rnn in self.rnns:
            rnn.detach_hidden()

    def reset_hidden(self, bsz: int) -> None:
        """Set the hidden state to zeros for `bsz` sequences.

        Args:
            bsz: Sequences in the batch.
        """
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """As `reset_hidden`; see `RNNCell.init_inference`.

        Args:
            bsz: Sequences in the batch.
        """
        for rnn in self.rnns:
            rnn.init_inference(bsz)


class stackedRNN(_Several):
    """A stack of layers, each with a hidden state that is kept between calls.

    Args:
        inputRNN: The lowest layer, from which the others are made, or a list of all layers.
        num_layers: Number of layers [1].
        dropout: Probability of dropout between layers in training, in [0, 1) [0].
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
        """Run all layers over a sequence, starting from their hidden states.

        Args:
            input: (sequence, batch, features), or as `batch_first` says.
            collect_hidden: Return the hidden state after each step [False].
            reverse: Go from the last step to the first [False].

        Returns:
            The output of the highest layer, in the order of the input, and a list with the tensors
            of the final hidden state: h, and c of an LSTM, (layers, batch, features) each. With
            `collect_hidden` each item is instead a list of such tensors, one for each time step.
            For layers of unequal sizes a tensor becomes a tuple of (batch, features) tensors.

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
    """Two stacks, one in each direction, whose outputs are concatenated.

    They are independent: no layer sees the other direction, unlike the higher layers of `torch.nn`.
    Each parameter has two names, with `fwd.` and `rnns.0.`, or `bckwrd.` and `rnns.1.`, as in old
    checkpoints.

    Args:
        inputRNN: As of `stackedRNN`; the other direction gets layers like these.
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
        """Run both stacks over a sequence, starting from their hidden states.

        Args:
            input: As of `stackedRNN`.
            collect_hidden: Return the hidden state after each step [False].

        Returns:
            The output, with twice as many features, those of the forward direction first; and a
            tuple of hidden states, as the list of `stackedRNN`, concatenated likewise. That of the
            backward direction is its state after the first step of the sequence.

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
    """Return `num_layers` layers that fit together: the given ones, or copies of one."""
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
    # A subclass with a forward of its own takes one step at a time.
    takes_sequences = type(layer).forward is RNNCell.forward
    if takes_sequences and not collect_hidden:
        output, hidden = layer(input)
        return output, [hidden]
    steps = [layer(step) for step in input]
    output = torch.stack([hidden[0] for hidden in steps])
    return output, steps if collect_hidden else steps[-1:]


def _stacked(states: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Stack one tensor of each layer, if they have one size."""
    return torch.stack(states) if len({state.shape for state in states}) == 1 else states


def _side_by_side(one: Any, other: Any) -> Any:
    """Concatenate two directions: tensors, or lists and tuples of tensors."""
    if isinstance(one, Tensor):
        return torch.cat([one, other], -1)
    return type(one)(_side_by_side(*pair) for pair in zip(one, other, strict=True))
