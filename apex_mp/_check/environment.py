"""The report of `python -m apex_mp`: facts about this machine, and commands that fix problems."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from apex_mp._version import __version__
from apex_mp.core import extension


@dataclass(frozen=True)
class Fact:
    """One line of the report; `mend` says what to do about it, or is empty."""

    name: str
    value: str
    mend: str = ""


@dataclass(frozen=True)
class Report:
    """All facts, and whether apex_mp can be used here."""

    facts: tuple[Fact, ...]
    usable: bool

    def __str__(self) -> str:
        lines = []
        for fact in self.facts:
            lines.append(f"{fact.name:<16} {fact.value}")
            lines += [f"    -> {line.strip()}" for line in fact.mend.splitlines()]
        return "\n".join(lines)


def survey() -> Report:
    """Return facts about all that decides whether and how apex_mp runs; a missing part is one."""
    facts = list(_host_facts())
    try:
        torch = extension.import_torch()
    except ImportError as error:
        facts.append(Fact("torch", "missing", str(error)))
        return Report(tuple(facts), usable=False)
    facts += _torch_facts(torch)
    try:
        built = extension.load()
    except ImportError as error:
        facts += [Fact("extension", "cannot be loaded", str(error)), *_build_tool_facts()]
        return Report(tuple(facts), usable=False)
    facts += _extension_facts(built)
    facts += _cuda_facts(built, torch)
    return Report((*facts, *_build_tool_facts()), usable=True)


def _host_facts() -> Iterator[Fact]:
    yield Fact("apex_mp", f"{__version__} in {Path(__file__).resolve().parents[1]}")
    yield Fact("Python", f"{platform.python_version()} at {sys.executable}")
    yield Fact("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")


def _torch_facts(torch: ModuleType) -> Iterator[Fact]:
    cuda = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Fact("torch", f"{torch.__version__}, {cuda}")
    openmp = os.environ.get("OMP_NUM_THREADS", "unset")
    yield Fact("threads", f"{torch.get_num_threads()} in torch, OMP_NUM_THREADS {openmp}")


def _extension_facts(built: ModuleType) -> Iterator[Fact]:
    debug = ", a DEBUG build" if built.debug else ""
    yield Fact("extension", f"built for torch {built.torch_version}{debug}")
    yield Fact("compiler", built.compiler)
    best, used = built.cpu_levels()[0], built.cpu_level()
    lower = "" if used == best else f" (this processor could use {best}; see APEX_MP_CPU_LEVEL)"
    yield Fact("instruction set", used + lower)


def _cuda_facts(built: ModuleType, torch: ModuleType) -> Iterator[Fact]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    archs = [f"{gpu.major}.{gpu.minor}" for gpu in gpus]
    names = [f"{gpu.name} ({arch})" for gpu, arch in zip(gpus, archs, strict=True)]
    rebuild = ""
    if built.with_cuda:
        value = f"{built.cuda_version} in this build, for {built.cuda_archs}"
        missing = sorted({arch for arch in archs if not runs_on(arch, built.cuda_archs)})
        if missing:
            wanted = ";".join([*built.cuda_archs.split(), *missing])
            rebuild = f'TORCH_CUDA_ARCH_LIST="{wanted}" FORCE_CUDA=1 '
    else:
        value = "not in this build"
        rebuild = "FORCE_CUDA=1 " if gpus else ""
    yield Fact("CUDA", value, extension.build_hint(rebuild) if rebuild else "")
    idle = not gpus and torch.version.cuda is None and shutil.which("nvidia-smi") is not None
    mend = "torch has no CUDA, but nvidia-smi is here: install a CUDA build of torch, then rebuild"
    yield Fact("GPUs", ", ".join(names) or "none that torch sees", mend if idle else "")


def runs_on(arch: str, built_archs: str) -> bool:
    """Return whether code for one of `built_archs` ("8.0 9.0") runs on a GPU of `arch` ("8.6").

    Machine code runs on its own major version, from its minor version onward. PTX would run on
    later ones too, but be compiled there at first use; it is not counted.
    """
    major, minor = (int(part) for part in arch.split("."))
    built = [tuple(int(part) for part in one.split(".")) for one in built_archs.split()]
    return any(have[0] == major and have[1] <= minor for have in built)


def _build_tool_facts() -> Iterator[Fact]:
    # Not needed to run, only to build again.
    tools = ("setuptools", "wheel", "ninja", "pybind11")
    missing = [name for name in tools if importlib.util.find_spec(name) is None]
    if "ninja" in missing and shutil.which("ninja"):
        missing.remove("ninja")
    mend = f'to build again: "{sys.executable}" -m pip install {" ".join(missing)}'
    versions = [f"{name} {_version_of(name)}" for name in tools if name not in missing]
    absent = f"; missing: {', '.join(missing)}" if missing else ""
    yield Fact("build tools", ", ".join(versions) + absent, mend if missing else "")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of the system"
