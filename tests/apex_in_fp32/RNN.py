"""RNN in float32: the multiplicative LSTM, step by step.

The gates are those of torch's LSTM, with m = (w_mih x) * (w_mhh h) in the place of h, as in
Krause, Lu, Murray and Renals, "Multiplicative LSTM for sequence modelling", 2016,
https://arxiv.org/abs/1609.07959.
"""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.w_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.b_ih = nn.Parameter(torch.empty(4 * hidden_size))
        self.b_hh = nn.Parameter(torch.empty(4 * hidden_size))
        self.w_mih = nn.Parameter(torch.empty(hidden_size, input_size))
        self.w_mhh = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.hidden_size = hidden_size

    def forward(self, sequence):
        outputs = []
        w_ih, w_hh, w_mih, w_mhh = self.w_ih, self.w_hh, self.w_mih, self.w_mhh
        for x in sequence:
            m = (x @ w_mih.T) * (self.h @ w_mhh.T)
            i, f, u, o = (x @ w_ih.T + self.b_ih + m @ w_hh.T + self.b_hh).chunk(4, dim=1)
            self.c = f.sigmoid() * self.c + i.sigmoid() * u.tanh()
            self.h = o.sigmoid() * self.c.tanh()
            outputs.append(self.h)
        return torch.stack(outputs)


class mLSTM(nn.Module):  # noqa: N801
    def __init__(self, input_size, hidden_size, num_layers, bias):
        super().__init__()
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        self.rnns = nn.ModuleList([Layer(size, hidden_size) for size in sizes])
        assert bias

    def reset_hidden(self, batch_size):
        for layer in self.rnns:
            layer.h = layer.c = torch.zeros(batch_size, layer.hidden_size)

    def detach_hidden(self):
        for layer in self.rnns:
            layer.h, layer.c = layer.h.detach(), layer.c.detach()

    def forward(self, x):
        for layer in self.rnns:
            x = layer(x)
        return x, ([layer.h for layer in self.rnns], [layer.c for layer in self.rnns])
