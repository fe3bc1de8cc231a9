"""The loader's errors and `python -m apex_mp`: what is wrong, and which command mends it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import apex_mp
from apex_mp._check import environment
from apex_mp.core import extension

PACKAGE = Path(apex_mp.__file__).parent
COMMAND = "-m pip install --no-build-isolation"

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A folder with a copy of the package as it is before the extension is built."""
    ignore = shutil.ignore_patterns("_C.*.so", "_C.*.pyd", "_C.json", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "apex_mp", ignore=ignore)
    return tmp_path


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def import_error(folder: Path) -> str:
    """Import the package in `folder` and return the message of the ImportError that must come."""
    code = (
        "try:\n    import apex_mp\nexcept ImportError as error:\n    print(error)\n"
        "else:\n    print('no error from', apex_mp.__file__)"
    )
    result = run_python(folder, "-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout


def add_extension(folder: Path, content: str = "not a library") -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (folder / "apex_mp" / f"_C{suffix}").write_text(content)


# The loader


@pytest.mark.slow
def test_a_missing_extension_is_an_import_error_with_the_build_command(unbuilt: Path) -> None:
    message = import_error(unbuilt)
    assert "has not been built for Python" in message
    assert COMMAND in message


@pytest.mark.slow
def test_sources_that_hide_an_installed_apex_mp_are_reported(
    unbuilt: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after "pip install ." in the folder of the sources, for Python started there.
    installed = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(unbuilt / "apex_mp", installed / "apex_mp")
    add_extension(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    message = import_error(unbuilt)
    assert f"no apex_mp._C in {unbuilt / 'apex_mp'}, which hides the one in {installed}" in message
    assert "start Python in another folder" in message


@pytest.mark.slow
def test_an_extension_of_another_torch_is_refused_before_it_is_loaded(unbuilt: Path) -> None:
    add_extension(unbuilt)  # loading it would give another error
    (unbuilt / "apex_mp" / "_C.json").write_text('{"torch": "2.12.1+cu128"}')
    message = import_error(unbuilt)
    assert f"was built for torch 2.12.1+cu128, but this is torch {torch.__version__}" in message
    assert '-m pip install "torch==2.12.1"' in message
    assert COMMAND in message


@pytest.mark.slow
def test_an_extension_that_the_dynamic_linker_refuses_is_named_with_the_command(
    unbuilt: Path,
) -> None:
    add_extension(unbuilt)
    public = torch.__version__.split("+")[0]  # cpu or cu130 is no other torch
    (unbuilt / "apex_mp" / "_C.json").write_text(f'{{"torch": "{public}+other"}}')
    message = import_error(unbuilt)
    assert f"built for torch {public}+other, cannot be loaded with torch" in message
    assert COMMAND in message


# python -m apex_mp


@pytest.mark.slow
def test_the_report_names_versions_and_the_instruction_set(tmp_path: Path) -> None:
    result = run_python(tmp_path, "-m", "apex_mp")
    assert result.returncode == 0, result.stderr
    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert facts["apex_mp"].startswith(apex_mp.__version__)
    assert facts["torch"].startswith(torch.__version__)
    assert facts["Python"].startswith(sys.version.split()[0])
    assert facts["instruction"].split()[1] in ("baseline", "avx2", "avx512")
    assert facts["extension"] == f"built for torch {torch.__version__}"
    assert " in torch, OMP_NUM_THREADS " in facts["threads"]
    assert {"CUDA", "GPUs", "compiler"} <= set(facts)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("-m", "apex_mp"), ("-mapex_mp",)])
def test_the_report_is_printed_where_the_extension_is_missing(
    arguments: tuple[str, ...], unbuilt: Path
) -> None:
    result = run_python(unbuilt, *arguments)
    assert result.returncode == 1
    assert result.stderr == ""
    assert f"torch            {torch.__version__}" in result.stdout
    assert "extension        cannot be loaded" in result.stdout
    assert COMMAND in result.stdout


@pytest.mark.parametrize("built_for", ["2.13.0", "2.13.0+cu130"])
def test_a_wheel_without_torch_names_the_release_that_it_was_built_for(
    built_for: str, unbuilt: Path
) -> None:
    (unbuilt / "apex_mp" / "_C.json").write_text(f'{{"torch": "{built_for}"}}')
    report = run_python(unbuilt, "-S", "-m", "apex_mp")
    imported = run_python(unbuilt, "-S", "-c", "import apex_mp")
    for text in (report.stdout, imported.stderr):
        assert f"built for torch {built_for}" in text
        assert '-m pip install "torch==2.13.0"' in text


@pytest.mark.slow
@pytest.mark.parametrize("python", [(), ("-S",)], ids=["without the extension", "without torch"])
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--help"], "usage: python -m apex_mp [-h] [--version] [run ...]"),
        (["-h"], "python -m apex_mp run --help"),
        (["--version"], f"apex_mp {apex_mp.__version__}\n"),
        (["run", "--help"], "--era {auto,2019-03,2019-08,2020}"),
        (["run", "-h"], "usage: python -m apex_mp run"),
    ],
)
def test_help_and_version_are_printed_where_nothing_can_run(
    arguments: list[str], printed: str, python: tuple[str, ...], unbuilt: Path
) -> None:
    result = run_python(unbuilt, *python, "-m", "apex_mp", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert printed in result.stdout


# GPUs, as they would be


def gpu_facts(
    monkeypatch: pytest.MonkeyPatch, *, built: str | None, gpu: tuple[int, int] | None
) -> dict[str, environment.Fact]:
    """Survey with an extension built for CUDA architectures, or without CUDA, and with a GPU."""
    built_extension: Any = SimpleNamespace(
        with_cuda=built is not None,
        cuda_version="13.0" if built is not None else None,
        cuda_archs=built or "",
        torch_version="2.13.0",
        compiler="GCC",
        debug=False,
        cpu_level=lambda: "avx2",
        cpu_levels=lambda: ["avx512", "avx2", "baseline"],
    )
    gpus = [SimpleNamespace(name="Some GPU", major=gpu[0], minor=gpu[1])] if gpu else []
    cuda = SimpleNamespace(device_count=lambda: len(gpus), get_device_properties=gpus.__getitem__)
    torch_like: Any = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda="13.0" if gpu else None),
        cuda=cuda,
        get_num_threads=lambda: 4,
    )
    monkeypatch.setattr(extension, "import_torch", lambda: torch_like)
    monkeypatch.setattr(extension, "load", lambda: built_extension)
    report = environment.survey()
    assert report.usable
    return {fact.name: fact for fact in report.facts}


def test_a_gpu_with_a_cpu_build_gets_the_cuda_build_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = gpu_facts(monkeypatch, built=None, gpu=(9, 0))
    assert facts["GPUs"].value == "Some GPU (9.0)"
    assert facts["CUDA"].value == "not in this build"
    assert "FORCE_CUDA=1 " in facts["CUDA"].mend


def test_a_cpu_torch_on_a_machine_with_a_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    facts = gpu_facts(monkeypatch, built=None, gpu=None)
    assert facts["GPUs"].value == "none that torch sees"
    assert "install a CUDA build of torch" in facts["GPUs"].mend


def test_a_level_below_the_processors_best_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gpu_facts(monkeypatch, built=None, gpu=None)
    assert facts["instruction set"].value.startswith("avx2 (this processor could use avx512")


def test_missing_build_tools_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = environment.importlib.util.find_spec
    hidden = {"pybind11", "wheel"}
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name, package=None: None if name in hidden else real(name, package),
    )
    tools = gpu_facts(monkeypatch, built=None, gpu=None)["build tools"]
    assert tools.value.endswith("; missing: wheel, pybind11")
    assert "pip install wheel pybind11" in tools.mend
