"""The CUDA kernel of examples/custom_op, run on the host under both sanitizers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from builder import CXX, FLAGS, KERNEL_FLAGS, ROOT, SANITIZE, SHIM

SOURCE = ROOT / "examples" / "custom_op" / "row_normalize.cu"
# Rows of lengths whose squares are beyond float16; what follows the last row is AddressSanitizer's.
DRIVER = """
#include <cstdio>
#include <vector>
#include "cuda_fp16.h"
#include "cuda_runtime.h"
namespace {
%s
}  // namespace
int main() {
  for (const int64_t columns : {1, 31, 32, 33, 1000}) {
    for (const int64_t rows : {1, 8, 19}) {
      std::vector<__half> x, y(rows * columns);
      for (int64_t i = 0; i < rows * columns; ++i)
        x.push_back(__float2half_rn(static_cast<float>((i * 37 %% 601) - 300 + (i == 0))));
      const unsigned int blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
      cuda_on_cpu::start(row_normalize_kernel, blocks, kWarp * kRowsOfBlock, 0, cudaStream_t{},
                         x.data(), y.data(), rows, columns);
      for (int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (int64_t i = row * columns; i < (row + 1) * columns; ++i)
          sum += double{__half2float(x[i])} * __half2float(x[i]);
        for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
          const double exact = __half2float(x[i]) / std::sqrt(sum);
          const double error = std::abs(__half2float(y[i]) - exact);
          if (error > 0x1p-10 * std::abs(exact) + 0x1p-24 || error != error) {
            std::printf("row %%d of %%d columns\\n", int(row), int(columns));
            return 1;
          }
        }
      }
    }
  }
  std::puts("right");
}
"""
# Bugs, and what must find each: the text, what it becomes, what the run says.
BUGS = {
    "none": ("", "", "right"),
    "a lane is left out": ("other /= 2", "other /= 4", "row 0"),
    "sums are in float16": (
        "sum += value * value;",
        "sum = __half2float(__float2half_rn(sum + value * value));",
        "row 0",
    ),
    "rows behind the last": ("if (row >= rows) return;", "", "AddressSanitizer"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_rows_have_unit_length_and_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    text, replacement, expected = BUGS[bug]
    found = re.search(r"constexpr int kWarp.*?\n}\n", SOURCE.read_text(), re.DOTALL)
    assert found is not None
    kernel = found[0]
    assert text in kernel
    (tmp_path / "driver.cpp").write_text(DRIVER % kernel.replace(text, replacement))
    parts = [SHIM / f"{name}.cpp" for name in ("execution", "fiber", "report", "streams")]
    flags = [*FLAGS, *KERNEL_FLAGS, *SANITIZE, "-DCUDART_VERSION=13000", "-DCUDA_ON_CPU_ASAN"]
    program = tmp_path / "driver"
    command = [CXX, *flags, f"-I{SHIM}", tmp_path / "driver.cpp", *parts, "-o", program]
    built = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert expected in ran.stdout + ran.stderr
    assert (ran.returncode == 0) is (bug == "none")
