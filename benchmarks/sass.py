"""What the CUDA compiler makes of the kernels: registers, spills, and the loops over vectors.

No GPU is needed, but nvcc.

python -m benchmarks.sass                            print the tables, and what is wrong
python -m benchmarks.sass --archs 90 --files step/check.cu    of one architecture and file
python -m benchmarks.sass --save-results benchmarks/results/sass.json    what the tests compare with
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.sass_code import facts_of, functions_in
from benchmarks.step_report import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sass.json"
ARCHS = ("75", "80", "86", "89", "90", "100", "120")
# As setup.py compiles them.
FLAGS = ("-O3", "--fmad=false", "-lineinfo", "-DNDEBUG", "-std=c++17", "-Xptxas", "-v")
# Four blocks of 256 threads share the registers of a multiprocessor.
MOST_REGISTERS = 64
# Kernels that spill some 100 bytes on sm_90, with which an H100 was faster (docs/decisions.md).
SPILLING = {f"step_kernel<{of}>" for of in ("Adam", "Adam, bfloat16", "Lamb", "Lamb, bfloat16")}
SPILLED_AT_MOST = 176  # bytes, on 9.0
SPILLED_OF_BYTES = 64
READING_BYTES = ("codes_kernel<Adam>",)  # four codes of one byte at once, and exponents
# Relative differences from the published figures; beyond them these have to be renewed.
KERNEL_SLACK = {"registers": 0.05, "instructions": 0.05}
LOOP_SLACK = {
    **{"instructions": 0.05, "fp16_turn": 0.05},
    **dict.fromkeys(["loads", "stores", "b64"], 0.0),
}

Row = dict[str, Any]

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def nvcc() -> str:
    """Return the compiler's path."""
    return str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")


def compiler() -> str:
    """Return its name and release."""
    release = re.search(r"release [\d.]+, V[\d.]+", run([nvcc(), "--version"]))
    return f"nvcc {release[0] if release else ''}"


def packaged(package: str, program: str) -> str:
    """Return the path of a program in an installed package."""
    files = importlib.metadata.distribution(package).files or []
    return str(next(file for file in files if file.name == program).locate())


def sources(folder: Path) -> list[Path]:
    """Return the files of csrc/cuda in a folder that hold kernels."""
    files = sorted((folder / "cuda").rglob("*.cu"))
    return [file for file in files if "__global__" in file.read_text(encoding="utf-8")]


def file_of(source: Path) -> str:
    """Return a file's name below csrc/cuda, such as step/update.cu."""
    return f"{source.parent.name}/{source.name}"


def kernels_of(source: Path, archs: Sequence[str]) -> list[Row]:
    """Return a row for each kernel of a file and each architecture.

    Headers are found from the folder two above the file's.
    """
    nvdisasm = packaged("nvidia-cuda-nvdisasm", "nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        command = [nvcc(), *FLAGS, *codes, "-I", str(source.parents[2]), "-fatbin", str(source)]
        command += ["-o", f"{folder}/kernels.fatbin", "--keep", "--keep-dir", folder]
        rows = list(what_ptxas_said(run(command), file_of(source)))
        for cubin in Path(folder).glob("*.cubin"):
            graph = run([nvdisasm, "-bbcfg", "-poff", str(cubin)])
            facts = {name: facts_of(function) for name, function in functions_in(graph).items()}
            # nvcc names check.compute_90.cubin; of a single architecture, check.cubin.
            arch = cubin.stem.partition(".compute_")[2] or archs[0]
            for row in rows:
                if row["sm"] == arch:
                    row |= facts[row.pop("mangled")]
    return rows


def run(command: Sequence[str]) -> str:
    """Return what a program prints, or raise with it."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout + done.stderr


def what_ptxas_said(said: str, file: str) -> Iterable[Row]:
    """Yield a row for each kernel and architecture in the messages of ptxas."""
    row: Row = {}
    for line in said.splitlines():
        if found := _KERNEL.search(line):
            row = {"kernel": name_of(found[1]), "file": file, "sm": found[2], "mangled": found[1]}
        elif row and (found := _SPILLS.search(line)):
            row |= {"stack": int(found[1]), "spilled": int(found[2]) + int(found[3])}
        elif row and (found := _USED.search(line)):
            yield row | {"registers": int(found[1]), "shared": int(found[2] or 0)}


def name_of(mangled: str) -> str:
    """Return the name of a kernel as the source has it, and for which rule and state."""
    name, rest = "", mangled
    while not name.endswith("_kernel"):
        name, rest = first_name(rest, r"(\d+)(?=[a-z_])")
    if not rest.startswith("I"):
        return name
    rule, rest = first_name(rest, r"4math(\d+)(?=[A-Z])")
    narrow = ", bfloat16" if re.match(r"ELNS_5DTypeE1E", rest) else ""
    return f"{name}<{rule}{narrow}>"


def first_name(mangled: str, length: str) -> tuple[str, str]:
    """Return the first name behind a length, and what follows it."""
    found = re.search(length, mangled)
    if found is None:
        raise ValueError(f"{mangled} names no kernel")
    end = found.end() + int(found[1])
    return mangled[found.end() : end], mangled[end:]


def faults(measured: Row, known: Row) -> list[str]:
    """Return a sentence for each thing that kernels must not do, or do not do as published."""
    found = []
    if measured["compiler"] != known["compiler"]:
        found.append(f"This is {measured['compiler']}; published is {known['compiler']}")
    published_rows = {(row["file"], row["kernel"], row["sm"]): row for row in known["kernels"]}
    for row in measured["kernels"]:
        before = published_rows.get((row["file"], row["kernel"], row["sm"]))
        sentences = [
            *faults_of(row),
            *(differences(row, before) if before else ["is not published"]),
        ]
        found += [f"{row['kernel']} of {row['file']}, sm_{row['sm']}, {said}" for said in sentences]
    return found


def faults_of(row: Row) -> Iterator[str]:
    """Yield what no kernel may do, published or not."""
    if row["registers"] > MOST_REGISTERS:
        yield f"takes {row['registers']} registers; {MOST_REGISTERS} are the most"
    spills = row["spilled"] or row["stack"] or row["local"]
    may_spill = SPILLED_AT_MOST if row["sm"] == "90" and row["kernel"] in SPILLING else 0
    may_spill = SPILLED_OF_BYTES if row["kernel"] in READING_BYTES else may_spill
    if spills and (not may_spill or row["spilled"] > may_spill):
        yield (
            f"spills {row['spilled']} bytes, has {row['stack']} bytes of stack and accesses local "
            f"memory {row['local']} times; it must keep all in registers"
        )
    for loop in row["loops"]:
        if loop["scalar"] and row["kernel"] not in READING_BYTES:
            yield f"makes {loop['scalar']} accesses of less than 64 bits in a vector loop"
        if loop["generic"]:
            yield (
                f"makes {loop['generic']} generic accesses in a vector loop; the compiler must "
                "know that memory is global"
            )


def differences(row: Row, published: Row) -> Iterator[str]:
    """Yield where a kernel differs by more than the slack from what is published of it."""
    if len(row["loops"]) != len(published["loops"]):
        yield f"has {len(row['loops'])} vector loops; published: {len(published['loops'])}"
    yield from beyond(KERNEL_SLACK, row, published, "")
    for loop, known in zip(row["loops"], published["loops"], strict=False):
        yield from beyond(LOOP_SLACK, loop, known, " in a vector loop")


def beyond(slacks: dict[str, float], found: Row, published: Row, where: str) -> Iterator[str]:
    """Yield the figures that are further from the published ones than the slack."""
    for key, slack in slacks.items():
        if abs(found[key] - published[key]) > slack * published[key]:
            yield f"has {key}={found[key]}{where}; published: {published[key]}"


def page(results: Row) -> str:
    """Return what docs/data.md shows of results."""
    rows = results["kernels"]
    loops = [row for row in rows if row["loops"]]
    tables = [by_arch("registers (bytes spilled)", rows, registers)]
    tables.append(by_arch("instructions (accesses)", loops, fp16_turn))
    return "\n\n".join([results["compiler"], *tables])


def registers(row: Row) -> str:
    """Return the number of registers, and of bytes that are spilled if there are any."""
    spilled = f" ({row['spilled']})" if row["spilled"] else ""
    return f"{row['registers']}{spilled}"


def fp16_turn(row: Row) -> str:
    """Return instructions and accesses of a turn of the first vector loop that reads fp16."""
    loop = next(loop for loop in row["loops"] if loop["fp16_turn"])
    return f"{loop['fp16_turn']} ({loop['fp16_turn_accesses']})"


def by_arch(name: str, rows: Sequence[Row], figure: Callable[[Row], str]) -> str:
    """Return a Markdown table with a line for each kernel and a column for each architecture."""
    archs = list(dict.fromkeys(row["sm"] for row in rows))
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        lines.setdefault((row["file"], row["kernel"]), [shown(row)]).append(figure(row))
    return "\n".join(markdown([name, *(f"sm_{arch}" for arch in archs)], [*lines.values()]))


def shown(row: Row) -> str:
    """Return a kernel's name for Markdown, which would take <Adam> for a tag."""
    name: str = row["kernel"]
    return f"`{name}`" if "<" in name else name


def text_of(results: Row) -> str:
    """Return results as JSON with a line for each kernel, for readable diffs."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in results["kernels"])
    compiler = json.dumps(results["compiler"])
    return f'{{\n "compiler": {compiler},\n "kernels": [\n{rows}\n ]\n}}\n'


def published() -> Row:
    """Return the results that are in the repository."""
    results: Row = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def main(argv: list[str] | None = None) -> Row:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--archs", nargs="+", default=ARCHS, metavar="ARCH", help="such as 90")
    parser.add_argument(
        "--files", nargs="+", metavar="FILE", help="such as step/check.cu; default: all"
    )
    parser.add_argument("--save-results", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    files = sources(ROOT / "csrc")
    if args.files:
        files = [file for file in files if file_of(file) in args.files]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        by_file = pool.map(lambda file: kernels_of(file, args.archs), files)
        results = {"compiler": compiler(), "kernels": [row for rows in by_file for row in rows]}
    known = published()
    if args.save_results:
        args.save_results.write_text(text_of(results), encoding="utf-8")
    print(page(results), "\n".join(faults(results, known)), sep="\n\n")
    return results


if __name__ == "__main__":
    main()
