"""examples/custom_op: a function of one precision runs under amp once it is registered."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import apex_mp

RUN = Path(__file__).resolve().parents[2] / "examples" / "custom_op" / "run.py"

pytestmark = pytest.mark.slow  # It builds an extension.


WANTED = {"cpu": "x is Half; it must be Float", "cuda": "x is Float; it must be Half on CUDA"}


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(scope="module")
def transcript(request: pytest.FixtureRequest, extensions: Path) -> dict[str, str]:
    """What the example printed, by the first words of each line."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--device", request.config.getoption("device")],
        env={
            **os.environ,
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "PYTHONPATH": str(Path(apex_mp.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert [*extensions.rglob("custom_op*.so")]
    return dict(re.findall(r"^(.*?) +((?:fails|trains): .*)$", done.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def example(transcript: dict[str, str], extensions: Path) -> Iterator[ModuleType]:
    """The example as a module, which has loaded what it built in `transcript`."""
    spec = importlib.util.spec_from_file_location("custom_op_example", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
        patch.setenv("PATH", os.environ["PATH"])
        module.build()
        yield module


@pytest.mark.slow
def test_without_registration_the_function_refuses_what_amp_hands_it(
    transcript: dict[str, str], device: torch.device
) -> None:
    assert transcript["as it is"].startswith("fails: ")
    assert transcript["as it is"].endswith(WANTED[device.type])


@pytest.mark.slow
def test_a_decorator_or_a_registration_makes_the_model_train(
    transcript: dict[str, str], device: torch.device
) -> None:
    found = re.fullmatch(r"trains: loss (\S+) -> (\S+)", transcript["decorated"])
    assert found is not None
    first, last = map(float, found.groups())
    assert last < (0.1 if device.type == "cpu" else 0.5) * first
    assert transcript["registered by name"] == transcript["decorated"]
    assert len(transcript) == 3


@pytest.mark.parametrize("columns", [1, 31, 33, 1000])
def test_the_function_divides_rows_by_their_length(
    example: ModuleType, device: torch.device, columns: int
) -> None:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    # Lengths up to 9000: the sum of squares is beyond float16.
    x = (300 * torch.randn(70, columns, device=device)).to(dtype).requires_grad_()
    weights = torch.randn(70, columns, device=device, dtype=dtype)
    y = example.row_normalize(x)
    (grad,) = torch.autograd.grad((y * weights).float().sum(), x)
    exact_x = x.detach().double().requires_grad_()
    exact = exact_x / exact_x.norm(dim=1, keepdim=True)
    (exact_grad,) = torch.autograd.grad((exact * weights.double()).sum(), exact_x)
    assert y.dtype is dtype
    error = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=error, atol=error)
    # A gradient is a difference of numbers of the size of the weights, divided by the length.
    bound = 8 * error * float((weights.double().norm(dim=1) / exact_x.detach().norm(dim=1)).max())
    assert float((grad.double() - exact_grad).abs().max()) <= bound


def test_each_device_has_its_kernel(example: ModuleType, device: torch.device) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("custom_op::row_normalize", "CPU")
    # make cuda-link has a toolkit and no GPU: the CUDA function is compiled and linked there.
    assert has("custom_op::row_normalize", "CUDA") is example.builds_cuda()
