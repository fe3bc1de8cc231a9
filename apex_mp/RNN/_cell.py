"""RNNCell: the weights of one recurrent layer and its hidden state, kept between calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from apex_mp.RNN._steps import RECURRENCES, LSTMCell, run_sequence


class Weights(NamedTuple):
    """The weights of a cell during one call: parameters, or tensors computed from parameters."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_ho: Tensor | None
    w_mih: Tensor | None = None
    w_mhh: Tensor | None = None


class RNNCell(nn.Module):
    """One recurrent layer; called with one time step, or with a sequence.

    Its hidden state, the list `hidden` of tensors (batch, features), starts at zeros and is kept
    for the next call; a batch of another size starts at zeros again. It has the dtype and device
    of the weights. Copies and pickles of a cell have its values, detached from the graph.

    Args:
        gate_multiplier: How many gates: 4 of an LSTM, 3 of a GRU, 1 of a simple RNN.
        input_size: Features of the input.
        hidden_size: Features of the cell.
        cell: Computes a step: `cell(input, hidden, w_ih, w_hh, b_ih=, b_hh=)` returns the new
            hidden state: a tensor, or several, the output first. `hidden` is a tensor or a list in
            the same way. The cells of `apex_mp.RNN.models` run by torch's recurrences, others step
            by step.
        n_hidden_states: How many tensors the hidden state has: 2 of an LSTM, h and c [2].
        bias: Have biases b_ih and b_hh [False].
        output_size: Features of the output, to which w_ho projects h after each step; the next step
            starts from the projection [None: `hidden_size`, without a projection].

    Attributes:
        w_ih: (gate_multiplier * hidden_size, input_size).
        w_hh: (gate_multiplier * hidden_size, output_size).
        b_ih: (gate_multiplier * hidden_size), or None; likewise b_hh.
        w_ho: (output_size, hidden_size), or None.

    Raises:
        ValueError: A size is not an int of 1 or more.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_ho: Tensor | None

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Callable[..., Any],
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_multiplier = at_least_one("gate_multiplier", gate_multiplier)
        self.input_size = at_least_one("input_size", input_size)
        self.hidden_size = at_least_one("hidden_size", hidden_size)
        self.output_size = hidden_size
        if output_size is not None:
            self.output_size = at_least_one("output_size", output_size)
        self.n_hidden_states = at_least_one("n_hidden_states", n_hidden_states)
        self.cell = cell
        self.bias = bias
        self.gate_size = gate_multiplier * hidden_size
        self.hidden: list[Tensor | None] = [None] * n_hidden_states
        self._add("w_ih", self.gate_size, self.input_size)
        self._add("w_hh", self.gate_size, self.output_size)
        projects = self.output_size != self.hidden_size
        self._add("w_ho", *((self.output_size, self.hidden_size) if projects else ()))
        for name in ("b_ih", "b_hh"):
            self._add(name, *((self.gate_size,) if bias else ()))
        self.reset_parameters()
        self.flatten_parameters()

    def _add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape)) if shape else None)

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Return a cell of the same kind and sizes with weights of its own.

        Args:
            new_input_size: Features of its input [None: as here].
        """
        return type(self)(
            self.gate_multiplier,
            self.input_size if new_input_size is None else new_input_size,
            self.hidden_size,
            self.cell,
            self.n_hidden_states,
            self.bias,
            self.output_size,
        )

    @torch.no_grad()
    def reset_parameters(self, gain: float = 1) -> None:
        """Draw all weights uniformly from [-b, b], with b = `1 / sqrt(hidden_size)`.

        Args:
            gain: No effect, as in apex [1].
        """
        bound = 1.0 / math.sqrt(self.hidden_size)
        for param in self.parameters():
            param.uniform_(-bound, bound)

    # The hidden state

    def init_hidden(self, bsz: int) -> None:
        """Make a hidden state of zeros for `bsz` sequences, unless there is one for as many.

        Args:
            bsz: Sequences in the batch.
        """
        like = next(self.parameters(), None)
        self._init_hidden(bsz, self.w_ih if like is None else like)

    def _init_hidden(self, bsz: int, like: Tensor) -> None:
        sizes = [self.output_size] + [self.hidden_size] * (self.n_hidden_states - 1)
        # A new list, because the replicas of DataParallel share the old one.
        self.hidden = [
            like.new_zeros(bsz, size, requires_grad=False)
            if state is None or state.size(0) != bsz
            else state
            for size, state in zip(sizes, self.hidden, strict=True)
        ]

    def reset_hidden(self, bsz: int) -> None:
        """Set the hidden state to zeros for `bsz` sequences.

        Args:
            bsz: Sequences in the batch.
        """
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """As `reset_hidden`; use `torch.no_grad()` if no gradients are needed.

        Args:
            bsz: Sequences in the batch.
        """
        self.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Detach the hidden state from the graph; its values stay.

        Raises:
            RuntimeError: There is none yet.
        """
        if any(state is None for state in self.hidden):
            raise RuntimeError(
                "detach_hidden: there is no hidden state yet; call the module, or init_hidden(bsz)"
            )
        self.hidden = [*(state.detach() for state in cast(list[Tensor], self.hidden))]

    def _start(self, bsz: int, like: Tensor) -> list[Tensor]:
        """Return the hidden state with which a call begins."""
        self._init_hidden(bsz, like)
        states = cast(list[Tensor], self.hidden)
        if not torch.is_inference_mode_enabled():
            # Autograd cannot save tensors that were made in inference mode.
            states = [state.clone() if state.is_inference() else state for state in states]
        return [state.to(like) for state in states]

    def __getstate__(self) -> dict[str, Any]:
        # A tensor that is part of a graph can neither be copied nor pickled.
        hidden = [None if state is None else state.detach() for state in self.hidden]
        return {**self.__dict__, "hidden": hidden}

    def __deepcopy__(self, memo: dict[int, Any]) -> RNNCell:
        # Not by __getstate__, which torch's parametrizations refuse, because they copy another way.
        result = memo[id(self)] = type(self).__new__(type(self))
        result.__dict__ = copy.deepcopy(RNNCell.__getstate__(self), memo)
        return result

    # The weights

    def _weights(self) -> Weights:
        """Return the present weights."""
        return Weights(self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_ho)

    def flatten_parameters(self) -> None:
        """Move the weights to one block of memory, as `torch.nn.RNNBase.flatten_parameters` does.

        cuDNN then need not copy them at each call. It is called after each change of device or
        dtype by a method of the module, and does nothing on a CPU and for computed weights.
        """
        own = [self._parameters.get(name) for name in Weights._fields]
        weights = [param for param in own if param is not None]
        if not self._has_recurrence() or not weights or not weights[0].is_cuda:
            return
        _, name, options = RECURRENCES[self.cell]
        projection = {"proj_size": self.output_size} if self.w_ho is not None else {}
        layer: nn.RNNBase = getattr(nn, name)(
            self.input_size,
            self.hidden_size,
            bias=self.bias,
            device="meta",
            **options,
            **projection,
        )
        # torch does not flatten weights if there are fewer than the layer has.
        layer._flat_weights = [*weights]
        layer.flatten_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RNNCell:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.flatten_parameters()
        return self

    def _has_recurrence(self) -> bool:
        """Return whether torch runs this cell over a whole sequence."""
        projection_fits = self.cell is LSTMCell and self.output_size < self.hidden_size
        return self.cell in RECURRENCES and (self.w_ho is None or projection_fits)

    @staticmethod
    def _in_torchs_order(weights: Weights) -> list[Tensor]:
        return [tensor for tensor in weights if tensor is not None]

    # A call

    def forward(self, input: Tensor) -> Any:  # noqa: A002
        """Take one time step, or all steps of a sequence, from the hidden state.

        Args:
            input: (batch, input_size), or (sequence, batch, input_size), in the weights' dtype.

        Returns:
            For a step the new hidden state, a tuple whose first tensor is the output. For a
            sequence the output (sequence, batch, output_size) and that tuple.

        Raises:
            ValueError: The input has other dimensions, another number of features, no time step, or
                is not of the weights' dtype.
        """
        weights = self._weights()
        self._check(input, weights.w_ih)
        sequence = input if input.dim() == 3 else input.unsqueeze(0)
        hidden = self._start(sequence.size(1), weights.w_ih)
        output, hidden = self._compute(sequence, hidden, weights)
        self.hidden = [*hidden]
        return (output, tuple(hidden)) if input.dim() == 3 else tuple(hidden)

    def _check(self, input: Tensor, weight: Tensor) -> None:  # noqa: A002
        name = type(self).__name__
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{name}: input has shape {[*input.shape]}; it must be (batch, features) or "
                "(sequence, batch, features)"
            )
        if input.size(-1) != self.input_size:
            raise ValueError(
                f"{name}: input has {input.size(-1)} features; this layer takes {self.input_size}"
            )
        if input.size(0) == 0 and input.dim() == 3:
            raise ValueError(f"{name}: input has no time step; it needs one or more")
        # The same test as in torch.nn.
        autocast = torch._C._is_any_autocast_enabled()
        if self._is_ours() and input.dtype is not weight.dtype and not autocast:
            raise ValueError(
                f"{name}: input is {input.dtype}, the weights are {weight.dtype}; cast one of them"
            )

    def _is_ours(self) -> bool:
        """Return whether the step is one of this package, not of the user."""
        return self.cell in RECURRENCES

    def _compute(
        self,
        input: Tensor,  # noqa: A002
        hidden: list[Tensor],
        weights: Weights,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run in the dtype of the weights, or in float32 where torch is slow in float16."""
        dtype = weights.w_ih.dtype
        if dtype is not torch.float16 or not weights.w_ih.is_cpu or not self._is_ours():
            return self._run(input, hidden, weights)
        exact = Weights._make(None if tensor is None else tensor.float() for tensor in weights)
        output, hidden = self._run(input.float(), [state.float() for state in hidden], exact)
        return output.to(dtype), [state.to(dtype) for state in hidden]

    def _run(
        self,
        input: Tensor,  # noqa: A002
        hidden: list[Tensor],
        weights: Weights,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output of a sequence, and the hidden state after it."""
        if self._has_recurrence():
            return run_sequence(
                self.cell, input, hidden, self._in_torchs_order(weights), weights.b_ih is not None
            )
        outputs = []
        for step in input:
            hidden = self._step(step, hidden, weights)
            outputs.append(hidden[0])
        return torch.stack(outputs), hidden

    def _step(
        self,
        input: Tensor,  # noqa: A002
        hidden: Sequence[Tensor],
        weights: Weights,
    ) -> list[Tensor]:
        result = self.cell(
            input,
            hidden[0] if self.n_hidden_states == 1 else [*hidden],
            weights.w_ih,
            weights.w_hh,
            b_ih=weights.b_ih,
            b_hh=weights.b_hh,
        )
        hidden = [result] if self.n_hidden_states == 1 else [*result]
        if weights.w_ho is not None:
            hidden = [functional.linear(hidden[0], weights.w_ho), *hidden[1:]]
        return [*hidden]

    def extra_repr(self) -> str:
        name = getattr(self.cell, "__name__", type(self.cell).__name__)
        projection = "" if self.output_size == self.hidden_size else f" -> {self.output_size}"
        return f"{name}, {self.input_size}, {self.hidden_size}{projection}, bias={self.bias}"


def at_least_one(name: str, value: int) -> int:
    """Return a size.

    Raises:
        ValueError: It is not an int of 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an int of 1 or more")
    return value
