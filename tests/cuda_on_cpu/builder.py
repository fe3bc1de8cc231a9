"""Build csrc/cuda with the host compiler into a library that registers its kernels for CPU tensors.

An object is compiled again when its command or a file that it includes has changed. To build a few
changed sources, as for each planted bug, `Library.objects` of another build are taken as they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SHIM = Path(__file__).resolve().parent / "shim"
OUT = ROOT / "build" / "cuda_on_cpu"
GENERATED = "generated"  # csrc/cuda/ as the host compiler reads it, in a build's folder
PLAN_HEADER = "plan_on_cpu.h"  # compiled before the sources of csrc/plan/, which include torch

JOBS = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
CXX = os.environ.get("CXX", "g++")


@dataclasses.dataclass(frozen=True)
class Grid:
    """How work is cut into launches."""

    cudart_version: int  # csrc/cuda/table.h: tables of 32,400 bytes from 12010 on, else of 3,600
    max_blocks: int | None = None  # in place of kMaxBlocks of csrc/cuda/launch.h
    plan: bool = True  # with the step plan of csrc/plan/, to which all grids are one


GRIDS = {"wide": Grid(13000), "narrow": Grid(12000, max_blocks=64, plan=False)}

FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# As csrc/ is built by setup.py; nvcc lets vectors alias numbers.
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
# What nobody wrote is the same garbage each time, and no valid address: GCC 12 and later.
FLAGS += ["-ftrivial-auto-var-init=pattern"]
# Static variables of inline functions would not go into the section of __shared__ variables.
KERNEL_FLAGS = ["-fno-weak"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
SANITIZE += ["-fsanitize-sections=cuda_shared", "-fno-omit-frame-pointer"]


@dataclasses.dataclass(frozen=True)
class Library:
    """What `build` made: the library, and where the objects and sources of it lie."""

    path: Path
    sources_root: Path
    objects: dict[str, Path]

    def is_made_of(self, name: str, sources_root: Path, generated: Path) -> bool:
        """Return whether an object would be the same if it were made of other sources."""
        pairs = [(self.sources_root, sources_root), (self.path.parent / GENERATED, generated)]
        return all(
            Path(path).read_bytes() == (other / Path(path).relative_to(root)).read_bytes()
            for path in _included(self.objects[name])
            for root, other in pairs
            if Path(path).is_relative_to(root)
        )


def build(
    out: Path,
    *,
    grid: str = "wide",
    extra_flags: Sequence[str] = (),
    sanitize: bool = True,
    sources_root: Path = CSRC,
    unchanged: Library | None = None,
) -> Library:
    """Compile and link `out`/cuda_on_cpu.so.

    Args:
        out: Where everything goes.
        grid: A key of `GRIDS`.
        extra_flags: For the objects made of `sources_root`, and for the linker.
        sanitize: With AddressSanitizer and UndefinedBehaviorSanitizer.
        sources_root: csrc/ or a copy of it.
        unchanged: A build with the same arguments, of other sources. Its objects are taken where
            the sources do not differ.

    Raises:
        RuntimeError: The compiler failed; with its messages.
    """
    out.mkdir(parents=True, exist_ok=True)
    _translate_cuda(sources_root, out / GENERATED, GRIDS[grid])
    commands = _compile_commands(out, GRIDS[grid], extra_flags, sanitize, sources_root)
    if GRIDS[grid].plan:
        folder = out if unchanged is None else unchanged.path.parent
        plan = _plan_commands(out, GRIDS[grid], extra_flags, sanitize, sources_root, folder)
        header = plan.pop(PLAN_HEADER)
        if unchanged is None:  # else it is there, and others are reading it
            _run(folder / f"{PLAN_HEADER}.gch", header)
        commands |= plan
    objects = {name: out / f"{name}.o" for name in commands}
    for name in commands:
        if unchanged is not None and unchanged.is_made_of(name, sources_root, out / GENERATED):
            objects[name] = unchanged.objects[name]
    with ThreadPoolExecutor(JOBS) as pool:
        own = [name for name in commands if objects[name].parent == out]
        list(pool.map(lambda name: _run(objects[name], commands[name]), own))
    path = out / "cuda_on_cpu.so"
    link = [CXX, "-shared", *(SANITIZE if sanitize else []), *extra_flags]
    _run(path, [*link, *map(str, objects.values()), *_torch_libraries()], objects.values())
    return Library(path, sources_root, objects)


def _translate_cuda(sources_root: Path, generated: Path, grid: Grid) -> None:
    """Write copies of csrc/cuda/ in which the two things are spelled that C++ has no words for.

    A launch becomes a call. A `__grid_constant__` parameter, one for all threads as on the device,
    becomes a reference: a copy of 32 KiB for each thread would take most of the time.
    """
    launches = 0
    for path in sorted((sources_root / "cuda").rglob("*.*")):
        text = path.read_text()
        text = re.sub(r"const __grid_constant__ ([\w<>]+) (\w+)", r"const \1& \2", text)
        text, count = re.subn(r"(\w+)<<<(.*)>>>\(", r"::cuda_on_cpu::start(\1, \2, ", text)
        launches += count
        if path.name == "launch.h" and grid.max_blocks is not None:
            text, count = re.subn(r"kMaxBlocks = \d+;", f"kMaxBlocks = {grid.max_blocks};", text)
            if count != 1:
                raise RuntimeError(f"{path} must say kMaxBlocks = (number); once")
        copy = generated / path.relative_to(sources_root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = f'#line 1 "csrc/{path.relative_to(sources_root)}"\n{text}'
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    for path in generated.rglob("*.*"):
        if not (sources_root / path.relative_to(generated)).exists():
            path.unlink()  # of an earlier csrc/
    if launches != 1:
        raise RuntimeError(f"{sources_root}/cuda says <<<>>> {launches} times; it must be once")


def _object(source: Path) -> str:
    """Return the object's name; there is a check.cu in operators/ and one in step/."""
    return f"{source.parent.name}_{source.stem}"


def _compile_commands(
    out: Path, grid: Grid, extra_flags: Sequence[str], sanitize: bool, sources_root: Path
) -> dict[str, list[str]]:
    """Return for each object the command that makes it, without its name."""
    from torch.utils import cpp_extension  # Here: it takes a second.

    torch_includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    base = _base_command(out, grid, sources_root)
    checked = [*base, *(SANITIZE if sanitize else []), *extra_flags]
    commands = {
        _object(path): [*checked, *KERNEL_FLAGS, "-xc++", str(path)]
        for path in sorted((out / GENERATED / "cuda").rglob("*.cu"))
    }
    commands["step_driver"] = [*checked, str(SHIM / "step_driver.cpp")]
    commands["operators"] = [*checked, *torch_includes, str(SHIM / "operators_on_cpu.cpp")]
    schema = ["-DAPEX_MP_WITH_CUDA", str(sources_root / "ops.cpp")]
    commands["ops"] = [*base, *extra_flags, *torch_includes, *schema]
    for name in ("execution", "fiber", "report", "streams"):
        asan = ["-DCUDA_ON_CPU_ASAN"] if sanitize else []
        commands[f"shim_{name}"] = [*base, *asan, str(SHIM / f"{name}.cpp")]
    return commands


def _plan_commands(
    out: Path,
    grid: Grid,
    extra_flags: Sequence[str],
    sanitize: bool,
    sources_root: Path,
    header_folder: Path,
) -> dict[str, list[str]]:
    """Return the commands that make the plan, and the one that makes its header."""
    from torch.utils import cpp_extension

    system = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = _base_command(out, grid, sources_root)
    command.insert(1, f"-I{header_folder}")
    command += [*(SANITIZE if sanitize else []), *extra_flags, "-DAPEX_MP_WITH_CUDA"]
    command += ["-Wno-parentheses", *(f"-isystem{path}" for path in system)]
    sources = [*sorted((sources_root / "plan").glob("*.cpp")), SHIM / "plan_module.cpp"]
    sources += [out / GENERATED / "cuda" / "step" / "stepper.cpp"]
    commands = {
        f"plan_{path.stem}": [*command, "-include", PLAN_HEADER, str(path)] for path in sources
    }
    return {PLAN_HEADER: [*command, "-xc++-header", str(SHIM / PLAN_HEADER)], **commands}


def _base_command(out: Path, grid: Grid, sources_root: Path) -> list[str]:
    macros = [f"-DCUDART_VERSION={grid.cudart_version}", "-D__CUDA_ARCH_LIST__=800,900"]
    includes = [f"-I{path}" for path in (out / GENERATED, SHIM, sources_root)]
    return [CXX, *FLAGS, *macros, *includes]


def _torch_libraries() -> list[str]:
    from torch.utils import cpp_extension

    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    return [*folders, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


def _run(target: Path, command: Iterable[str], inputs: Iterable[Path] | None = None) -> None:
    """Make `target` unless it was made by this command and is newer than what it is made of."""
    words = [*command, *(["-c"] if inputs is None else []), "-o", str(target)]
    noted = target.with_suffix(".cmd")
    line = shlex.join(words)
    if noted.exists() and noted.read_text() == line and target.exists():
        made = target.stat().st_mtime
        sources = [Path(path) for path in _included(target)] if inputs is None else inputs
        if all(path.exists() and path.stat().st_mtime < made for path in sources):
            return
    depfile = ["-MMD", "-MF", str(target.with_suffix(".d"))] if inputs is None else []
    done = subprocess.run([*words, *depfile], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{line}\n{done.stderr}")
    noted.write_text(line)


def _included(target: Path) -> list[str]:
    """Return the files that the compiler wrote to the .d file beside an object."""
    text = target.with_suffix(".d").read_text()
    return shlex.split(text.partition(":")[2].replace("\\\n", " "))
