"""One script of each kind of project, as they were written: with the name apex, on no GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import apex_mp
from apex_mp._run import cpu
from apex_mp._run.replacements import Replacements

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

FOLDER = Path(__file__).parents[1] / "old_scripts"
LAUNCHED = "imagenet"  # With arguments, in several processes.
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != LAUNCHED)


@pytest.fixture
def as_apex_on_cpu() -> Iterator[None]:
    replacements = Replacements()
    cpu.redirect(replacements)
    apex_mp.install_as_apex()
    yield
    apex_mp.uninstall_as_apex()
    replacements.undo()


def run(script: str, **names: Any) -> dict[str, Any]:
    path = FOLDER / f"{script}.py"
    found: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), found)
    return found


@pytest.mark.usefixtures("as_apex_on_cpu")
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_old_script_trains_without_a_change(script: str, tmp_path: Path) -> None:
    losses = run(script, store=f"file://{tmp_path}/store")["losses"]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.usefixtures("as_apex_on_cpu")
def test_the_subclass_of_2019_reads_what_it_did() -> None:
    names = run("sequence_to_sequence")
    assert names["first_scale"] == 2.0**32
    assert names["state"]["scale_factor"] == 2.0
    assert names["state"]["cur_iter"] == 40


@pytest.mark.slow
def test_the_same_script_runs_by_the_command(tmp_path: Path) -> None:
    root = str(Path(apex_mp.__file__).resolve().parent.parent)
    script = (FOLDER / "bert_fine_tuning.py").read_text() + "\nprint(losses[-1] < losses[0])\n"
    (tmp_path / "script.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "-m", "apex_mp", "run", "--device", "cpu", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
    assert "--era 2019-03, by FP16_Optimizer at script.py:" in result.stderr
    assert result.stderr.count("\n") == 2


# ImageNet: options, a resumed run, and several processes that a launcher starts.


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator = numpy.random.default_rng(3)
    labels = generator.integers(0, 6, 32)
    images = generator.normal(size=(32, 1, 4, 4)) * 0.1
    images[:, 0, 0, 0] = labels
    numpy.save(tmp_path / "images.npy", images.astype(numpy.float32))
    numpy.save(tmp_path / "labels.npy", labels)
    return tmp_path


def run_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(apex_mp.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    options = ("--device", "cpu", "--modernize")
    return subprocess.run(
        [sys.executable, "-m", "apex_mp", "run", *options, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def losses_of(result: subprocess.CompletedProcess[str]) -> list[float]:
    assert result.returncode == 0, result.stderr
    return [float(line.split()[3]) for line in result.stdout.splitlines() if "epoch" in line]


@pytest.mark.slow
def test_imagenet_trains_with_a_static_scale_and_resumes(images: Path) -> None:
    command = (
        str(FOLDER / f"{LAUNCHED}.py"),
        str(images),
        "--fp16",
        "--static-loss-scale",
        "128.0",
    )
    first = run_command(images, *command, "--prof", "--epochs", "2")
    second = run_command(images, *command, "--resume", "checkpoint.pth.tar", "--epochs", "4")
    losses = [*losses_of(first), *losses_of(second)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]
    said = {line.split(": ")[2] for line in first.stderr.splitlines() if "--modernize: " in line}
    assert said == {"torch._six", "numpy.int", "Tensor.view"}
    assert "torch.load" in second.stderr
    assert "UserWarning" not in first.stderr + second.stderr


@pytest.mark.slow
def test_imagenet_trains_in_two_launched_processes_that_share_statistics(images: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run_command(
        images,
        *("-m", "torch.distributed.launch", "--nproc_per_node=2", f"--master_port={port}"),
        *(str(FOLDER / f"{LAUNCHED}.py"), str(images), "--fp16", "--static-loss-scale", "128.0"),
        *("--sync_bn", "--epochs", "4"),
    )
    losses = losses_of(result)
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    weights = [numpy.load(images / f"weights{rank}.npy").tolist() for rank in range(2)]
    assert weights[0] == weights[1]


# Libraries that probe for apex, in the words that they use.


def is_available_by_spec() -> bool:
    return importlib.util.find_spec("apex") is not None


def is_available_by_metadata() -> bool:
    import importlib.metadata

    if importlib.util.find_spec("apex") is None:
        return False
    try:
        importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_available_by_submodule() -> bool:
    try:
        return importlib.util.find_spec("apex.amp") is not None
    except ModuleNotFoundError:
        return False


PROBES = [is_available_by_spec, is_available_by_metadata, is_available_by_submodule]


@pytest.fixture(params=["2019-03", "2019-08", "2020"])
def as_apex(request: pytest.FixtureRequest) -> Iterator[None]:
    apex_mp.install_as_apex(request.param)
    yield
    apex_mp.uninstall_as_apex()


@pytest.mark.parametrize("probe", PROBES)
def test_nobody_finds_an_apex_that_is_not_installed(probe: Any) -> None:
    assert not probe()


@pytest.mark.usefixtures("as_apex")
@pytest.mark.parametrize("probe", PROBES)
def test_who_finds_apex_finds_all_that_is_used_of_it(probe: Any) -> None:
    assert probe()
    names: dict[str, Any] = {}
    exec("from apex import amp", names)
    for name in ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"):
        assert callable(getattr(names["amp"], name))
    assert hasattr(names["amp"], "_amp_state")
    exec("from apex.optimizers import FusedAdam", names)


@pytest.mark.parametrize("era", ["2019-03", "2019-08", "2020"])
def test_a_norm_of_later_years_is_whole_or_left_to_the_library(era: str) -> None:
    class PlainNorm(torch.nn.Module):
        def __init__(self, size: int, eps: float) -> None:
            super().__init__()

    names: dict[str, Any] = {"FusedRMSNorm": PlainNorm}
    apex_mp.install_as_apex(era)
    try:
        with contextlib.suppress(ImportError):
            exec("from apex.normalization import FusedRMSNorm", names)
    finally:
        apex_mp.uninstall_as_apex()
    norm = names["FusedRMSNorm"](4, eps=1e-6)
    assert isinstance(norm, PlainNorm) == (era != "2020")
    if era == "2020":
        x = torch.randn(2, 4)
        assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (4,), norm.weight, 1e-6))
