"""Recurrent layers that keep their hidden state, with the names of apex.RNN, computed by torch."""

from apex_mp.RNN import RNNBackend, cells, models
from apex_mp.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "RNNBackend", "ReLU", "Tanh", "cells", "mLSTM", "models"]
