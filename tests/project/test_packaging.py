"""setup.py and pyproject.toml: what is built, how, and what is said when it cannot be."""

from __future__ import annotations

import ast
import email
import email.message
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch.utils import cpp_extension

import apex_mp
from apex_mp import _C

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
INSTALL = "pip install --no-build-isolation ."

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_torch,
    pytest.mark.cpu_only,
    pytest.mark.skipif(sys.platform == "win32", reason="the toolkits here are shell scripts"),
]


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_apex_mp", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # setup.py may add to it
    return load_setup()


def run_setup(
    *arguments: str, python: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "setup.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def make_toolkit(folder: Path, release: str) -> str:
    """Put a CUDA toolkit that knows its version and four architectures into `folder`."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        "[ $1 = --list-gpu-arch ] && echo compute_60 compute_75 compute_90 compute_100\n"
        f"[ $1 = --version ] && echo 'Cuda compilation tools, release {release}, V{release}.88'\n"
    )
    nvcc.chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "cuda.h").touch()
    return str(folder)


# Where nothing can be built


def test_without_torch_the_build_fails_at_once_with_the_command_to_use() -> None:
    # -S hides site-packages, as build isolation does.
    result = run_setup("egg_info", python=("-I", "-S"))
    assert result.returncode == 1
    first = 'pip install "torch>=2.11" "setuptools>=77" wheel ninja pybind11'
    assert f"Run both:\n  {first}\n  {INSTALL}\n" in result.stderr
    assert "No module named 'torch'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["dist_info", "build_ext"])
def test_without_a_compiler_a_build_says_one_sentence_and_no_more(
    command: str, tmp_path: Path
) -> None:
    result = run_setup(command, CXX=str(tmp_path / "c++"), FORCE_CUDA="0")
    assert (result.returncode, result.stdout) == (1, "")
    # torch with CUDA writes where it looks for nvcc.
    lines = [line for line in result.stderr.splitlines() if "torch/utils/" not in line]
    assert lines == [
        f"apex_mp is written in C++, and there is no compiler '{tmp_path}/c++'. "
        "Install one (Debian, Ubuntu: apt-get install g++), or set CXX to its path"
    ]


@pytest.mark.parametrize(
    "error",
    ["c++: error: unrecognized option '-std=c++20'", "probe.cpp:1:10: fatal error: omp.h: No file"],
)
def test_a_compiler_that_is_too_old_or_lacks_openmp_is_refused_with_its_first_error(
    error: str, setup_py: ModuleType, tmp_path: Path
) -> None:
    program = tmp_path / "c++"
    program.write_text(f'#!/bin/sh\necho "{error}" >&2\nexit 1\n')
    program.chmod(0o755)
    obstacle = setup_py.compiler_obstacle(str(program))
    assert f"with OpenMP, and '{program}' is none ({error}). Install one" in obstacle


@pytest.mark.parametrize("command", ["install", "develop"])
def test_old_commands_give_the_pip_command(command: str) -> None:
    result = run_setup(command)
    assert result.returncode == 1
    assert result.stderr.startswith(f"setup.py {command} is not supported")
    assert INSTALL in result.stderr


@pytest.mark.parametrize(
    ("path", "naming"),
    [
        ("tests/environments/oldest.txt", r"^torch==(.*)\.0$"),
        ("README.md", r"torch>=([\d.]+)"),
        ("README.md", r"PyTorch \(([\d.]+) or later\)"),
        ("apex_mp/core/extension.py", r"torch>=([\d.]+)"),
        ("docs/decisions.md", r"torch>=([\d.]+)"),
        ("docs/gpu.md", r"torch ([\d.]+) or later"),
    ],
)
def test_the_oldest_torch_is_the_same_wherever_it_is_named(
    path: str, naming: str, setup_py: ModuleType
) -> None:
    named = re.findall(naming, (ROOT / path).read_text(), re.MULTILINE)
    assert set(named) == {setup_py.LEAST_TORCH}


def test_metadata_can_be_read_where_the_build_cannot_run(tmp_path: Path) -> None:
    # Refused with a CPU torch because of the torch, with a CUDA torch because of that folder.
    environment = {"FORCE_CUDA": "1", "CUDA_HOME": str(tmp_path)}
    metadata = run_setup("--name", "--version", **environment)
    assert metadata.returncode == 0, metadata.stderr
    assert metadata.stdout.split() == ["apex-mp", apex_mp.__version__]
    build = run_setup(
        "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}", **environment
    )
    assert build.returncode == 1
    assert "FORCE_CUDA=0 pip install" in build.stderr
    assert "Traceback" not in build.stderr


# CPU or CUDA


@pytest.mark.parametrize(
    ("force", "torch_cuda", "toolkit", "with_cuda"),
    [
        # unset: CUDA if torch has it and there is a toolkit
        ("", "13.0", "13.0", True),
        ("", "13.0", None, False),
        ("", None, "13.0", False),
        # another minor version is fine
        ("", "13.0", "13.1", True),
        ("1", "13.0", "13.0", True),
        # 0 stands above everything, a mismatch too
        ("0", "13.0", "13.0", False),
        ("0", "13.0", "12.4", False),
    ],
)
def test_force_cuda_torch_and_toolkit_decide_what_is_built(
    force: str,
    torch_cuda: str | None,
    toolkit: str | None,
    with_cuda: bool,
    setup_py: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    home = make_toolkit(tmp_path, toolkit) if toolkit else None
    assert setup_py.plan_cuda(force, home) == (with_cuda, "")


@pytest.mark.parametrize(
    ("force", "torch_cuda", "toolkit", "sentence"),
    [
        ("yes", None, None, "FORCE_CUDA is 'yes'; it must be 1, 0 or unset"),
        ("1", None, "13.0", f"torch {torch.__version__} has no CUDA. Install one that has"),
        ("1", "13.0", None, "CUDA_HOME=None is no CUDA toolkit"),
        ("", "13.0", "12.4", "nvcc is CUDA 12.4, but torch"),
        ("", "13.0", "12.4", f"but torch {torch.__version__} was built with CUDA 13.0"),
        ("", "13.0", "12.4", "install the CUDA 13.0 toolkit and set CUDA_HOME"),
        ("", "13.0", "12.4", "install a torch that was built with CUDA 12.4"),
        ("", "13.0", "12.4", "FORCE_CUDA=0 pip install --no-build-isolation ."),
        ("1", "12.8", "13.0", "nvcc is CUDA 13.0, but torch"),
    ],
)
def test_what_stands_in_the_way_of_cuda_is_said_with_the_ways_out(
    force: str,
    torch_cuda: str | None,
    toolkit: str | None,
    sentence: str,
    setup_py: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    home = make_toolkit(tmp_path, toolkit) if toolkit else None
    with_cuda, obstacle = setup_py.plan_cuda(force, home)
    assert not with_cuda
    assert sentence in obstacle


@pytest.mark.parametrize("archs", ["7.5", "9.0a;10.0+PTX", "Turing"])
def test_architectures_that_nvcc_knows_are_no_obstacle(
    archs: str, setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
    assert setup_py.arch_obstacle(make_toolkit(tmp_path, "13.0")) == ""


@pytest.mark.parametrize(
    ("archs", "why"),
    [
        (
            "9.0;6.0",
            ": it cannot be built for 6.0, because kernels take over 32,000 bytes of arguments",
        ),
        ("7.0", ": it cannot be built for 7.0, because {home}/bin/nvcc does not know it. "),
        ("9.5", ": Unknown CUDA arch (9.5) or GPU not supported. "),
        ("", ", and no GPU is here to build for. "),
    ],
)
def test_a_wrong_architecture_is_refused_with_those_that_can_be_named(
    archs: str, why: str, setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
    said = setup_py.arch_obstacle(make_toolkit(tmp_path, "13.0"))
    assert said.startswith(f"TORCH_CUDA_ARCH_LIST is {archs!r}{why.format(home=tmp_path)}")
    assert said.endswith(
        "Name some of 7.5;9.0;10.0, the last with +PTX if it shall run on later GPUs too"
    )


# Sources and flags


@pytest.fixture
def cuda_extension(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> cpp_extension.CUDAExtension:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    return setup_py.extension(with_cuda=True)


def test_every_source_is_built(cuda_extension: cpp_extension.CUDAExtension) -> None:
    written = [path for path in Path("csrc").rglob("*") if path.suffix in (".cpp", ".cu")]
    included = re.findall(r'#include "(plan/.*)"', Path("build/plan.cpp").read_text())
    alone = {*cuda_extension.sources} - {"build/plan.cpp"}
    assert sorted([*alone, *(f"csrc/{path}" for path in included)]) == sorted(map(str, written))


def test_a_cpu_build_has_no_cuda_in_it(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    extension = setup_py.extension(with_cuda=False)
    assert extension.sources
    assert not [source for source in extension.sources if "cuda" in source]
    assert "APEX_MP_WITH_CUDA" not in dict(extension.define_macros)
    assert not [library for library in extension.libraries if "cuda" in library]


def test_nvcc_never_sees_a_torch_header(cuda_extension: cpp_extension.CUDAExtension) -> None:
    torch_folder = str(Path(torch.__file__).parent)
    for_all_compilers = cuda_extension.include_dirs + cuda_extension.extra_compile_args["nvcc"]
    assert not [word for word in for_all_compilers if torch_folder in word]
    assert [word for word in cuda_extension.extra_compile_args["cxx"] if torch_folder in word]


@pytest.mark.parametrize("platform", ["LINUX", "WINDOWS", "MACOS"])
@pytest.mark.parametrize("debug", [False, True])
def test_no_flag_lets_the_compiler_change_the_arithmetic(
    platform: str, debug: bool, setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WINDOWS", "MACOS"):
        monkeypatch.setattr(setup_py, name, name == platform)
    monkeypatch.setattr(setup_py, "DEBUG", debug)
    arguments = setup_py.flags([])["extra_compile_args"]
    assert not [word for words in arguments.values() for word in words if "fast" in word]
    assert "--fmad=false" in arguments["nvcc"]
    assert ("-ffp-contract=off" in arguments["cxx"]) == (platform != "WINDOWS")
    # torch names the standard: 2.11 wants C++17, 2.13 C++20.
    assert not [word for words in arguments.values() for word in words if "std" in word]


# The package


def test_build_isolation_would_not_install_a_torch() -> None:
    requires = re.search(r"^requires = (\[.*\])$", PYPROJECT, re.MULTILINE)
    assert requires is not None
    names = {re.split(r"\W", requirement)[0] for requirement in ast.literal_eval(requires[1])}
    assert names == {"setuptools", "wheel", "ninja", "pybind11"}


def metadata_of(command: str, folder: Path) -> email.message.Message:
    where = "egg-base" if command == "egg_info" else "output-dir"
    result = run_setup("-q", command, f"--{where}={folder}", FORCE_CUDA="0")
    assert result.returncode == 0, result.stderr
    name = "PKG-INFO" if command == "egg_info" else "METADATA"
    return email.message_from_string(next(folder.glob(f"*/{name}")).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel_metadata(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    return metadata_of("dist_info", tmp_path_factory.mktemp("wheel"))


def test_a_wheel_needs_the_release_of_torch_that_it_was_built_with(
    wheel_metadata: email.message.Message,
) -> None:
    requires = wheel_metadata.get_all("Requires-Dist")
    assert requires is not None
    (pin,) = [SpecifierSet(one.removeprefix("torch")) for one in requires if "torch" in one]
    # pip leaves the torch that is here, and one of the same release for another device.
    release = torch.__version__.split("+")[0]
    assert pin.contains(torch.__version__)
    assert pin.contains(f"{release}+cu130")
    assert not pin.contains("2.10.0")


def test_a_source_distribution_needs_any_torch_that_it_can_be_built_with(tmp_path: Path) -> None:
    requires = metadata_of("egg_info", tmp_path).get_all("Requires-Dist")
    assert requires is not None
    assert "torch>=2.11" in requires


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git which files there are")
def test_a_source_distribution_holds_what_git_holds(tmp_path: Path) -> None:
    result = run_setup(
        "-q", "egg_info", f"--egg-base={tmp_path}", "sdist", f"--dist-dir={tmp_path}"
    )
    assert result.returncode == 0, result.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert packed - {"PKG-INFO", "setup.cfg"} == set(tracked.stdout.splitlines())


TINY_MODULE = """
#include <pybind11/pybind11.h>
#define SPELL_EXPANDED(x) #x
#define SPELL(x) SPELL_EXPANDED(x)
PYBIND11_MODULE(_C, module) {
  module.attr("torch_version") = SPELL(APEX_MP_TORCH_VERSION);
  module.def("cpu_level", [] { return "baseline"; });
}
"""


def test_a_build_leaves_the_version_of_torch_beside_the_extension(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "module.cpp").write_text(TINY_MODULE)
    (tmp_path / "apex_mp" / "core").mkdir(parents=True)
    for name in ("setup.py", "README.md", "apex_mp/core/extension.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "apex_mp" / "__init__.py").touch()
    build = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "FORCE_CUDA": "0", "DEBUG": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    record = (tmp_path / "apex_mp" / "_C.json").read_text()
    assert record == f'{{"torch": "{torch.__version__}"}}\n'
    load = "from apex_mp.core.extension import load; print(load().torch_version)"
    loaded = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True
    )
    assert loaded.stdout.strip() == torch.__version__, loaded.stderr


def test_the_extension_says_what_was_built() -> None:
    assert _C.torch_version == torch.__version__
    assert _C.cpu_level() in _C.cpu_levels()
    assert _C.cpu_levels()[-1] == "baseline"
    if _C.with_cuda:
        assert _C.cuda_version == torch.version.cuda
        assert re.fullmatch(r"\d+\.\d( \d+\.\d)*", _C.cuda_archs)
    else:
        assert (_C.cuda_version, _C.cuda_archs) == (None, "")
