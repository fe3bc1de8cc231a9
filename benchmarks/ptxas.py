"""What the CUDA compiler makes of the kernels: registers, shared memory and spills; no GPU needed.

python -m benchmarks.ptxas                  print the table, write benchmarks/results/ptxas.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.step_report import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ptxas.json"
ARCHS = ("80", "90")
# As setup.py compiles them.
FLAGS = ("-O3", "--fmad=false", "-lineinfo", "-DNDEBUG", "-std=c++17", "-Xptxas", "-v")
HEAD = ("kernel", "file", "sm", "registers", "shared memory, B", "spilled, B", "stack, B")

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def nvcc() -> str:
    """Return the compiler's path."""
    return str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")


def compile_verbosely(source: Path, archs: Sequence[str]) -> str:
    """Return what ptxas says of a file."""
    with tempfile.TemporaryDirectory() as folder:
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        output = str(Path(folder) / "kernels.o")
        include = str(ROOT / "csrc")
        command = [nvcc(), *FLAGS, *codes, "-I", include, "-c", str(source), "-o", output]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def kernels_in(said: str, file: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and architecture that ptxas speaks of."""
    kernel: dict[str, Any] = {}
    for line in said.splitlines():
        if found := _KERNEL.search(line):
            kernel = {"kernel": name_of(found[1]), "file": file, "sm": found[2]}
        elif found := _SPILLS.search(line):
            kernel |= {"stack": int(found[1]), "spilled": int(found[2]) + int(found[3])}
        elif found := _USED.search(line):
            yield kernel | {"registers": int(found[1]), "shared": int(found[2] or 0)}


def name_of(mangled: str) -> str:
    """Return the name of a kernel as the source has it: the last one, length before name."""
    names, rest = [], mangled
    while found := re.search(r"(\d+)(?=[a-z_])", rest):
        length = int(found[1])
        names.append(rest[found.end() : found.end() + length])
        rest = rest[found.end() + length :]
    return next(name for name in names if name.endswith("_kernel"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    keys = ("kernel", "file", "sm", "registers", "shared", "spilled", "stack")
    return "\n".join(markdown(HEAD, [[str(row[key]) for key in keys] for row in rows]))


def page(results: dict[str, Any]) -> str:
    """Return what docs/speed.md shows of results."""
    return f"{results['compiler']}\n\n{table(results['kernels'])}"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    version = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release [\d.]+, V[\d.]+", version.stdout)
    results: dict[str, Any] = {"compiler": f"nvcc {release[0] if release else ''}", "kernels": []}
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        results["kernels"] += kernels_in(compile_verbosely(source, ARCHS), source.name)
    args.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(page(results))
    return results


if __name__ == "__main__":
    main()
