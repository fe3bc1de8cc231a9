"""What the CUDA compiler makes of the kernels is as benchmarks/results/sass.json says.

Without nvcc these tests are skipped, but not in CI, where they fail.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sass

needs_nvcc = pytest.mark.skipif(
    not Path(sass.nvcc()).exists() and not os.environ.get("CI"),
    reason=f"{sass.nvcc()} is not there; install nvcc 13 or set CUDA_HOME to its toolkit",
)
pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

RENEW = "python -m benchmarks.sass --save-results benchmarks/results/sass.json"


def row_of(**changes: Any) -> sass.Row:
    loop = {
        "instructions": 100,
        "fp16_turn": 60,
        "loads": 2,
        "stores": 2,
        "b64": 0,
        "generic": 0,
        "scalar": 0,
    }
    row = {
        "kernel": "adam_kernel", "file": "adam.cu", "sm": "90", "registers": 60, "stack": 0,
        "spilled": 0, "local": 0, "instructions": 500, "loops": [loop],
    }  # fmt: skip
    in_loop = {key: value for key, value in changes.items() if key in ("scalar", "generic", "b64")}
    return {**row, **changes, "loops": [{**loop, **in_loop}]}


def name_of(row: sass.Row) -> tuple[str, str, str]:
    return row["file"], row["kernel"], row["sm"]


def faults_of(row: sass.Row) -> list[str]:
    known = {"compiler": "nvcc", "kernels": [row_of()]}
    return sass.faults({"compiler": "nvcc", "kernels": [row]}, known)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"registers": 65}, "takes 65 registers; 64 are the most"),
        ({"spilled": 8}, "spills 8 bytes"),
        ({"local": 3}, "accesses local memory 3 times"),
        ({"scalar": 1}, "makes 1 accesses of less than 64 bits in a vector loop"),
        ({"generic": 2}, "makes 2 generic accesses in a vector loop"),
        ({"b64": 2}, "has b64=2 in a vector loop; published: 0"),
        ({"instructions": 526}, "has instructions=526; published: 500"),
        ({"instructions": 474}, "has instructions=474; published: 500"),
        ({"kernel": "sgd_kernel"}, "is not published"),
    ],
)
def test_each_fault_is_a_sentence(changes: dict[str, Any], fault: str) -> None:
    (said,) = [said for said in faults_of(row_of(**changes)) if fault in said]
    assert said.startswith(f"{changes.get('kernel', 'adam_kernel')} of adam.cu, sm_90, ")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("file", [sass.file_of(path) for path in sass.sources(sass.ROOT / "csrc")])
def test_kernels_do_not_spill_and_access_vectors_as_published(file: str) -> None:
    measured = {
        "compiler": sass.compiler(),
        "kernels": sass.kernels_of(sass.ROOT / "csrc" / "cuda" / file, sass.ARCHS),
    }
    known = sass.published()
    names = {*map(name_of, known["kernels"])}
    assert {*map(name_of, measured["kernels"])} == {name for name in names if name[0] == file}
    found = sass.faults(measured, known)
    assert not found, "\n".join([*found, f"If that is meant: {RENEW}"])


PLANTS = {
    "generic": ("step/update.cu", "vectors.h", r"__builtin_assume\(__isGlobal\(address\)\);", ""),
    "spill": (
        "step/update.cu",
        "step/update.cu",
        r"(?<=\(kBlockSize, )\w+(?=\)\s+step_kernel)",
        "8",
    ),
    "scalar": (
        "operators/unscale.cu",
        "vectors.h",
        r"fetch<cache>\(reinterpret_cast<const uint4\*>\(src\) \+ i\)",
        "make_uint4(fetch<cache>(reinterpret_cast<const uint32_t*>(src) + 4 * i), 0, 0, 0)",
    ),
}


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("spill", "bytes of stack and accesses local memory"),
        ("scalar", "accesses of less than 64 bits in a vector loop"),
        ("generic", "generic accesses in a vector loop"),
    ],
)
def test_a_planted_bug_is_found(tmp_path: Path, plant: str, fault: str) -> None:
    source, file, old, new = PLANTS[plant]
    folder = shutil.copytree(sass.ROOT / "csrc", tmp_path / "csrc") / "cuda"
    text, count = re.subn(old, new, (folder / file).read_text())
    assert count == 1
    (folder / file).write_text(text)
    measured = {"compiler": sass.compiler(), "kernels": sass.kernels_of(folder / source, ["90"])}
    found = sass.faults(measured, sass.published())
    assert any(fault in said for said in found), found
