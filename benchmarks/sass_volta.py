"""The kernels compiled for sm_70 (V100), which nvcc 13 does not support: registers and spills.

No GPU is needed, but nvcc 13 and ptxas 12.9:

python -m pip install --no-deps nvidia-cuda-nvcc-cu12==12.9.86
python -m benchmarks.sass_volta --save-results benchmarks/results/sass-sm70.json

nvcc writes PTX for compute_75, and the older ptxas compiles that for sm_70. It does not know the
version of PTX that nvcc 13 writes, so the two lines that name version and target are changed; an
instruction that sm_70 lacks is an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sass import (
    FLAGS,
    ROOT,
    Row,
    compiler,
    nvcc,
    packaged,
    run,
    shown,
    sources,
    text_of,
    what_ptxas_said,
)
from benchmarks.step_report import markdown

RESULTS = ROOT / "benchmarks" / "results" / "sass-sm70.json"
HEAD = ("kernel", "registers", "stack, B", "spilled, B")

_TARGET = re.compile(r"^\.version [\d.]+\n\.target sm_75$", re.MULTILINE)


def for_volta(ptx: str) -> str:
    """Return PTX that names the version of ptxas 12.9 and sm_70."""
    text, places = _TARGET.subn(".version 8.8\n.target sm_70", ptx)
    if places != 1:
        raise ValueError(f"the PTX names version and target {places} times; it must be once")
    return text


def kernels_of(source: Path) -> Iterator[Row]:
    """Yield a row for each kernel of a file."""
    ptxas = packaged("nvidia-cuda-nvcc-cu12", "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernels.ptx")
        command = [nvcc(), *FLAGS, "-arch=compute_75", "-I", str(source.parents[1])]
        run([*command, "-ptx", str(source), "-o", str(ptx)])
        ptx.write_text(for_volta(ptx.read_text(encoding="utf-8")), encoding="utf-8")
        said = run([ptxas, "-v", "-arch=sm_70", str(ptx), "-o", f"{folder}/kernels.cubin"])
        for row in what_ptxas_said(said, source.name):
            del row["mangled"]
            yield row


def page(results: Row) -> str:
    """Return what docs/gpu.md shows of results."""
    keys = ("registers", "stack", "spilled")
    rows = [[shown(row), *(str(row[key]) for key in keys)] for row in results["kernels"]]
    return "\n".join([results["compiler"], "", *markdown(HEAD, rows)])


def main(argv: list[str] | None = None) -> Row:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--save-results", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = [row for source in sources(ROOT / "csrc") for row in kernels_of(source)]
    release = importlib.metadata.version("nvidia-cuda-nvcc-cu12")
    results = {"compiler": f"{compiler()}, ptxas {release}", "kernels": rows}
    if args.save_results:
        args.save_results.write_text(text_of(results), encoding="utf-8")
    print(page(results))
    return results


if __name__ == "__main__":
    main()
