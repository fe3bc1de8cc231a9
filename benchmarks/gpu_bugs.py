"""Bugs planted in copies of the extension: do the tests on the device fail where they must?

    python -m benchmarks.gpu_bugs       run the tests of each bug; exit 1 if one is not caught

Most are bugs that tests/cuda_on_cpu cannot show: there threads take turns, nothing is launched on a
stream and the host waits for everything. `gpu_build --prepare` builds them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu_machine import PREPARED, ROOT

SECONDS = 45  # for the tests of one bug, which take about ten


@dataclasses.dataclass(frozen=True)
class Change:
    """A text replacement in a copy of the sources."""

    file: str
    old: str
    new: str

    def plant(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} must hold this once, not {count} times: {self.old}")
        return text.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Bug(Change):
    """A change with which tests must fail, and a regular expression of their words."""

    tests: str  # a file or a test, then "-k" and what is wanted of it
    says: str

    def command(self, device: str) -> list[str]:
        """Return how to run the tests, up to the first that fails."""
        where, _, names = self.tests.partition(" -k ")
        command = ["pytest", "-q", "-x", "-p", "no:cacheprovider", f"--device={device}"]
        return [*command, str(ROOT / where), *(["-k", names] if names else [])]


STEPS = "tests/optimizers/test_cuda_steps.py"
BUGS = {
    "the-host-waits": Bug(
        "csrc/cuda/step/stepper.cpp",
        "  resident.table.run(task, run, current);\n",
        "  resident.table.run(task, run, current);\n"
        "  if (!run.captured) cudaStreamSynchronize(current);\n",
        f"{STEPS}::test_a_step_of_fused_adam_is_few_launches_and_no_wait -k 300",
        r"cudaStreamSynchronize",
    ),
    "all-is-launched-on-the-default-stream": Bug(
        "csrc/cuda/launch.h",
        "kBlockSize, 0, stream>>>",
        "kBlockSize, 0, cudaStream_t{}>>>",
        f"{STEPS}::test_replays_of_a_whole_iteration_are_iterations",
        r"operation .* captur|\)\.(overflow|loss_scale)$|<built-in method equal",
    ),
    "threads-do-not-wait-for-the-factors": Bug(
        "csrc/cuda/step/update.cu",
        "  __syncthreads();\n  PartOf<Rule> part = part_of<Rule>(row,",
        "  PartOf<Rule> part = part_of<Rule>(row,",
        "tests/optimizers/test_fused_adam_equivalence.py"
        " -k 300_steps_equal_those_of_torch_in_float64",
        r"Tensor-likes are not close",
    ),
    "the-count-of-blocks-is-not-reset": Bug(
        "csrc/cuda/step/last_block.h",
        "atomicInc(arrived, blocks - 1) == blocks - 1;",
        "atomicInc(arrived, 0xffffffffu) == blocks - 1;",
        f"{STEPS}::test_overflows_are_reported_with_the_names_of_parameters",
        r"\)\.overflow$|== 256\.0|inf or NaN",
    ),
    "unaligned-memory-is-taken-for-aligned": Bug(
        "csrc/cuda/table.h",
        "static_cast<int8_t>(head_of(row))",
        "static_cast<int8_t>(0 * head_of(row))",
        "tests/operators/test_operators.py::test_unscale_multiplies_and_rounds_once -k off",
        r"misaligned address",
    ),
}


def judge(bug: Bug, status: int | None, output: str) -> str:
    """Return "caught", or how the tests failed to catch the bug."""
    if status is None:
        return f"not caught: the tests did not end in {SECONDS} seconds"
    if status == 0 or not re.search(r"^(FAILED|ERROR) ", output, re.MULTILINE):
        return "NOT CAUGHT"
    errors = "\n".join(re.findall(r"^E .*", output, re.MULTILINE))  # without the tests' source
    if not re.search(bug.says, errors, re.MULTILINE):
        return f"not caught: the tests failed, but did not say {bug.says!r}"
    return "caught"


def run(slug: str, bug: Bug, device: str) -> tuple[str, str]:
    """Run the tests of a bug on the package that has it; return the result and what they print."""
    folder = PREPARED / "bugs" / slug
    if not (folder / "apex_mp" / "__init__.py").exists():
        return "not built (make gpu-prepare)", ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *bug.command(device)],
            cwd=folder,  # whose apex_mp Python finds first
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return judge(bug, None, ""), ""
    return judge(bug, done.returncode, done.stdout), done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    with ThreadPoolExecutor() as pool:  # They mostly wait for torch to be imported.
        ran = list(pool.map(lambda slug: run(slug, BUGS[slug], args.device), BUGS))
    for slug, (_, output) in zip(BUGS, ran, strict=True):
        print(f"== {slug}\n{output}")
    for slug, (found, _) in zip(BUGS, ran, strict=True):
        print(f"{slug}: {found}")
    sys.exit({found for found, _ in ran} != {"caught"})


if __name__ == "__main__":
    main()
