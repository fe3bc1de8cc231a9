"""The policy for recurrent layers and cells, by the names that torch.nn calls them by."""

import torch

MODULE = torch._VF

# Run in low precision, outputs and hidden states too.
FP16_FUNCS = [
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
]
