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

from benchmarks import sass, sass_volta
from benchmarks.sass_code import facts_of, functions_in, loops_in

needs_nvcc = pytest.mark.skipif(
    not Path(sass.nvcc()).exists() and not os.environ.get("CI"),
    reason=f"{sass.nvcc()} is not there; install nvcc 13 or set CUDA_HOME to its toolkit",
)
pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

RENEW = "python -m benchmarks.sass --save-results benchmarks/results/sass.json"

# A loop of 4 blocks: the head, two ways to load, the end. BB9 is a loop of its own, in double.
GRAPH = r"""
subgraph "cluster_adam_kernel" {
"start"
[label="{<entry>start:\l0000:\ \ \ LDC\ R1,\ c\[0x0\]\ ;\l}"]
"start":entry:s -> "head":entry:n [style=solid];
"head"
[label="{<entry>head:\l0010:\ \ \ IADD3\ R9,\ R0\ ;\l|<exit0>0020:\ \ \ @!P0\ BRA\ `(half)\ ;\l}"]
"head":exit0:e -> "half":entry:n [style=solid];
"head":exit0:s -> "float":entry:n [style=solid];
"float"
[label="{<entry>0030:\ \ \ @P1\ LDG.E.EF.128\ R4,\ desc\[UR4\]\[R6.64\]\ ;\l}"]
"float":entry:s -> "end":entry:n [style=solid];
"half"
[label="{0040:\ LD.E.64\ R4;\l0050:\ HADD2.F32\ R4;\l0060:\ STL\ R4;\l0065:\ LDG.E.U16\ R4;\l}"]
"half":entry:s -> "end":entry:n [style=solid];
"end"
[label="{<entry>0070:\ \ \ FFMA\ R4\ ;\l0080:\ \ \ STG.E.128\ R4\ ;\l|<exit0>0090:\ \ \ BRA\ ;\l}"]
"end":exit0:e -> "head":entry:n [style=solid];
"end":exit0:s -> "BB9":entry:n [style=solid];
"BB9"
[label="{<entry>00a0:\ \ \ LDG.E.128\ R4\ ;\l00b0:\ \ \ DADD\ R4\ ;\l|<exit0>00c0:\ \ \ BRA\ ;\l}"]
"BB9":exit0:e -> "BB9":entry:n [style=solid];
}
}
"""
SAID = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7apex_mp4cuda12_GLOBAL__N_111adam_kernelE'\
 for 'sm_90'
ptxas info    : Function properties for _ZN7apex_mp4cuda12_GLOBAL__N_111adam_kernelE
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 80 bytes smem, 32100 bytes cmem[0]
ptxas info    : Compile time = 42.000 ms
ptxas info    : Compiling entry function '_ZN7apex_mp4cuda4_GLO14prepare_kernelEv' for 'sm_80'
ptxas info    : Function properties for _ZN7apex_mp4cuda4_GLO14prepare_kernelEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, 400 bytes cmem[0]
"""


def test_registers_spills_and_shared_memory_are_read_for_each_kernel() -> None:
    first, second = sass.what_ptxas_said(SAID, "adam.cu")
    assert first == {
        "kernel": "adam_kernel", "file": "adam.cu", "sm": "90",
        "mangled": "_ZN7apex_mp4cuda12_GLOBAL__N_111adam_kernelE",
        "registers": 62, "shared": 80, "spilled": 12, "stack": 16,
    }  # fmt: skip
    assert second["kernel"] == "prepare_kernel"
    assert (second["sm"], second["registers"], second["shared"]) == ("80", 38, 0)


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN7apex_mp4cuda12_GLOBAL__N_111adam_kernelE", "adam_kernel"),
        (
            "_ZN7apex_mp4cuda12_GLOBAL__N_111step_kernelINS_4math3SgdEEEvNS0_10StepUpdateE",
            "step_kernel<Sgd>",
        ),
        (
            "_ZN7apex_mp4cuda12_GLOBAL__N_111step_kernelINS_4math8NovogradEEEvNS0_10StepUpdateE",
            "step_kernel<Novograd>",
        ),
        (
            "_ZN7apex_mp4cuda12_GLOBAL__N_111step_kernelINS_4math4LambELNS_5DTypeE1EEEvNS0_10Step",
            "step_kernel<Lamb, bfloat16>",
        ),
        (
            "_ZN7apex_mp4cuda12_GLOBAL__N_111step_kernelINS_4math4LambELNS_5DTypeE2EEEvNS0_10Step",
            "step_kernel<Lamb>",
        ),
    ],
)
def test_a_kernel_is_named_with_its_rule(mangled: str, name: str) -> None:
    assert sass.name_of(mangled) == name


def test_what_is_no_kernel_has_no_name() -> None:
    with pytest.raises(ValueError, match="names no kernel"):
        sass.name_of("_ZN7apex_mp4cuda5blockE")


def test_the_vector_loop_is_found_with_its_accesses_and_the_shortest_turn_that_reads_fp16() -> None:
    facts = facts_of(functions_in(GRAPH)["adam_kernel"])
    assert (facts["instructions"], facts["local"]) == (14, 1)
    (loop,) = facts["loops"]
    assert loop == {
        "instructions": 10, "loads": 3, "stores": 1, "b64": 1, "scalar": 1, "generic": 1,
        "fp16_turn": 9, "fp16_turn_accesses": 3,
    }  # fmt: skip


def test_a_loop_is_what_it_holds_without_the_loops_inside_it() -> None:
    following = {
        "a": ["b"], "b": ["c"], "c": ["d", "c"], "d": ["e"], "e": ["f", "d"],
        "f": ["b", "g"], "g": [],
    }  # fmt: skip
    assert list(loops_in(following)) == [({"c"}, {"c"}), ({"d"}, {"d", "e"}), ({"b"}, {"b", "f"})]


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


def test_a_kernel_within_the_slack_has_no_fault() -> None:
    assert faults_of(row_of(instructions=525, registers=63)) == []


def test_ptx_of_another_target_is_not_taken_for_volta() -> None:
    ptx = "// made by nvcc\n.version 9.0\n.target sm_75\n.address_size 64\n"
    volta = "// made by nvcc\n.version 8.8\n.target sm_70\n.address_size 64\n"
    assert sass_volta.for_volta(ptx) == volta
    with pytest.raises(ValueError, match="names version and target 0 times"):
        sass_volta.for_volta(ptx.replace("sm_75", "sm_80"))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("file", [path.name for path in sass.sources(sass.ROOT / "csrc")])
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
    "generic": ("step_update.cu", "vectors.h", r"__builtin_assume\(__isGlobal\(address\)\);", ""),
    "spill": (
        "step_update.cu",
        "step_update.cu",
        r"(?<=\(kBlockSize, )\w+(?=\)\s+step_kernel)",
        "8",
    ),
    "scalar": (
        "unscale.cu",
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
