"""benchmarks.ptxas reads what the CUDA compiler says, and no kernel spills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ptxas

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PAGE = Path(ptxas.__file__).resolve().parents[1] / "docs" / "speed.md"
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
    first, second = ptxas.kernels_in(SAID, "adam.cu")
    assert first == {
        "kernel": "adam_kernel", "file": "adam.cu", "sm": "90",
        "registers": 62, "shared": 80, "spilled": 12, "stack": 16,
    }  # fmt: skip
    assert second["kernel"] == "prepare_kernel"
    assert (second["sm"], second["registers"], second["shared"]) == ("80", 38, 0)


def test_no_kernel_of_the_published_table_spills_and_all_fit_four_blocks() -> None:
    kernels = json.loads(ptxas.RESULTS.read_text())["kernels"]
    sources = {path.name for path in ptxas.ROOT.glob("csrc/cuda/*.cu")}
    assert {row["file"] for row in kernels} <= sources
    assert {"step_adam.cu", "step_check.cu"} <= {row["file"] for row in kernels}
    for row in kernels:
        assert (row["spilled"], row["stack"]) == (0, 0), row
        assert row["registers"] <= 64, row


def test_the_page_shows_the_published_table() -> None:
    said = ptxas.page(json.loads(ptxas.RESULTS.read_text()))
    assert said in PAGE.read_text(), f"docs/speed.md must hold:\n{said}"
