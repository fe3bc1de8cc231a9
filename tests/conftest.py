"""What all tests share: the device they run on, the seed, and the CPU level."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported. A test of threads sets their number; for the small tensors of all others
# a second thread costs more than it computes.
os.environ["OMP_NUM_THREADS"] = "1"
# Its key does not hold how the operators of apex_mp are traced: it would give the graph of another
# version of apex_mp, which an earlier run left in the cache on the disk.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import offload_cases
import torch
from each_value import cases_with_each_value
from torch import distributed as dist

from apex_mp import _C
from apex_mp.amp import _amp_state
from apex_mp.amp.casts import current as _current
from apex_mp.amp.casts import registry

# By default cuDNN multiplies float32 in TF32, with 10 bits of mantissa.
torch.backends.cudnn.allow_tf32 = False

# For benchmarks/. Last, so that an installed apex_mp comes before the one in this folder.
sys.path.append(str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where the tensors of the tests live: cpu, cuda"
    )
    parser.addoption(
        "--device-only", action="store_true", help="leave out tests without the fixture `device`"
    )
    parser.addoption(
        "--offload",
        action="store_true",
        help="fused optimizers keep their state in host memory, beside a stand-in for a GPU",
    )
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run each test with all of its parameters, not with a few that have each value",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only: is about the CPU; left out with another --device")
    config.addinivalue_line("markers", "cuda_only: needs --device cuda; left out without it")
    config.addinivalue_line(
        "markers",
        "slow: starts processes, builds or trains long; make test and CI's recipes leave it out",
    )
    config.addinivalue_line(
        "markers", "every_case: has parameters that interact; all of its cases run each time"
    )
    config.addinivalue_line(
        "markers", "any_torch: is as true of one torch as of another; make cuda-tests leaves it out"
    )
    if config.getoption("--offload"):
        offload_cases.offload_everywhere()
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(DeadContext())


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cpu = torch.device(config.getoption("device")).type == "cpu"
    unwanted = "cuda_only" if on_cpu else "cpu_only"
    device_only = config.getoption("--device-only")
    left_out = offload_cases.NOT_OFFLOADED if config.getoption("--offload") else ()
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        on_device = "device" in getattr(item, "fixturenames", ()) or item.get_closest_marker(
            "cuda_only"
        )
        if any(name in item.nodeid for name in left_out):
            continue
        if not item.get_closest_marker(unwanted) and (on_device or not device_only):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    every_case = config.getoption("every_case")
    chosen = set[pytest.Item]()
    for cases in functions.values():
        keeps_all = every_case or cases[0].get_closest_marker("every_case")
        chosen.update(cases if keeps_all else cases_with_each_value(cases))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


class DeadContext:
    """Ends a process of xdist after an error from which its CUDA context cannot recover.

    Each later test in the process would fail with the same error. xdist starts another process.
    """

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(1)


def pytest_collection_finish() -> None:
    # Each gc.collect() of a test would walk the hundreds of thousands of objects of the collection.
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A CUDA run has one "level": its kernels do not depend on the CPU.
    if "cpu_level" in metafunc.fixturenames:
        on_cpu = torch.device(metafunc.config.getoption("device")).type == "cpu"
        levels = _C.cpu_levels() if on_cpu else [_C.cpu_level()]
        metafunc.parametrize("cpu_level", levels, indirect=True)


@pytest.fixture(autouse=True, scope="session")
def sparse_checks() -> None:
    """Check each sparse tensor; torch 2.11 warns, even of a tensor that asks for the check."""
    torch.sparse.check_sparse_tensor_invariants.enable()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with the kernels of each instruction set that this processor has."""
    before = _C.cpu_level()
    _C.set_cpu_level(request.param)
    yield request.param
    _C.set_cpu_level(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Put back the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Be the only process of a process group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def amp_off() -> Iterator[None]:
    """Leave nothing of amp behind: no casts, no registrations, no state of `initialize`."""
    yield
    if _current.handle is not None:
        _current.handle._deactivate()
    registry.registrations.clear()
    vars(_amp_state).update(vars(type(_amp_state)()))
