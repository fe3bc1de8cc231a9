"""The CUDA kernels, run on the host under both sanitizers, pass the tests of every net."""

from __future__ import annotations

import pytest
from nets import NETS, RunNet

EACH_NET = [
    pytest.param(marks=pytest.mark.job("net", RunNet(net)), id=name) for name, net in NETS.items()
]


@pytest.mark.parametrize((), EACH_NET)
def test_the_cuda_kernels_pass(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["net"]
    assert status == 0, output[-20000:]
