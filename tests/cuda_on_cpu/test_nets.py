"""The CUDA kernels, run on the host under both sanitizers, pass the tests of every net."""

from __future__ import annotations

import pytest
from nets import NETS, RunNet


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    arguments = () if metafunc.config.getoption("short") else ("--every-case",)
    jobs = {name: pytest.mark.job("net", RunNet(net, arguments)) for name, net in NETS.items()}
    metafunc.parametrize((), [pytest.param(marks=job, id=name) for name, job in jobs.items()])


def test_the_cuda_kernels_pass(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["net"]
    assert status == 0, output[-20000:]
