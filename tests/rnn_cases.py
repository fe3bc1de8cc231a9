"""What the tests of apex_mp.RNN share: kinds of layers, torch's layers with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp import RNN
from apex_mp.RNN.RNNBackend import stackedRNN

KINDS: dict[str, Callable[..., Any]] = {
    "LSTM": RNN.LSTM,
    "GRU": RNN.GRU,
    "ReLU": RNN.ReLU,
    "Tanh": RNN.Tanh,
    "mLSTM": RNN.mLSTM,
}
IN_TORCH = ("LSTM", "GRU", "ReLU", "Tanh")
PROJECTED = ("LSTM", "ReLU", "Tanh", "mLSTM")
NAMES = {
    "w_ih": "weight_ih",
    "w_hh": "weight_hh",
    "b_ih": "bias_ih",
    "b_hh": "bias_hh",
    "w_ho": "weight_hr",
}


def in_torch(ours: stackedRNN, kind: str, **options: Any) -> nn.RNNBase:
    """Return torch's layer with the weights of ours."""
    cell: Any = ours.rnns[0]  # type: ignore[index]
    if cell.output_size != cell.hidden_size:
        options["proj_size"] = cell.output_size
    if kind in ("ReLU", "Tanh"):
        options["nonlinearity"] = kind.lower()
    layer: nn.RNNBase = getattr(nn, kind if kind in ("LSTM", "GRU") else "RNN")(
        cell.input_size, cell.hidden_size, ours.nLayers, bias=cell.bias, **options
    )
    weights = ours.state_dict()
    layer.load_state_dict({torchs_name(name): value for name, value in weights.items()})
    return layer.to(cell.w_ih)


def torchs_name(name: str) -> str:
    """Return "weight_ih_l0" for "rnns.0.w_ih"."""
    _, number, weight = name.split(".")
    return f"{NAMES[weight]}_l{number}"


def states_of(hidden: Any) -> list[Tensor]:
    """Return the tensors of a hidden state of torch.nn: one, or a tuple."""
    return [hidden] if isinstance(hidden, Tensor) else [*hidden]


def mixed_sum(*tensors: Tensor) -> Tensor:
    """Return a sum in which each element counts otherwise, of which to take gradients."""
    sums = []
    for tensor in tensors:
        weights = torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64)
        sums.append((tensor * weights.reshape(tensor.shape).to(tensor)).sum())
    return torch.stack(sums).sum()


def gradients(loss: Tensor, model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the parameters by name, and of the inputs by number."""
    wanted = dict(model.named_parameters())
    wanted |= {str(number): tensor for number, tensor in enumerate(inputs)}
    found = torch.autograd.grad(loss, [*wanted.values()])
    return dict(zip(wanted, found, strict=True))


def multiplicative_lstm(
    input: Tensor,  # noqa: A002
    weights: dict[str, Tensor],
    h: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer over a sequence, by the formulas of Krause et al., 2016, one gate at a time.

    In the gates of an LSTM m_t = (W_mx x_t) * (W_mh h_{t-1}) stands for h_{t-1}; then c and h are
    as of torch's. A projection, which the paper has not, is that of Sak et al., 2014: h_t is
    W_ho (o_t * tanh(c_t)).
    """
    outputs = []
    zero = torch.zeros(4 * c.size(1), dtype=c.dtype)
    bias = weights.get("b_ih", zero) + weights.get("b_hh", zero)
    w_ix, w_fx, w_gx, w_ox = weights["w_ih"].chunk(4)
    w_im, w_fm, w_gm, w_om = weights["w_hh"].chunk(4)
    b_i, b_f, b_g, b_o = bias.chunk(4)
    for x in input:
        m = (x @ weights["w_mih"].T) * (h @ weights["w_mhh"].T)
        i = torch.sigmoid(x @ w_ix.T + m @ w_im.T + b_i)
        f = torch.sigmoid(x @ w_fx.T + m @ w_fm.T + b_f)
        g = torch.tanh(x @ w_gx.T + m @ w_gm.T + b_g)
        o = torch.sigmoid(x @ w_ox.T + m @ w_om.T + b_o)
        c = f * c + i * g
        h = o * torch.tanh(c)
        if "w_ho" in weights:
            h = h @ weights["w_ho"].T
        outputs.append(h)
    return torch.stack(outputs), h, c
