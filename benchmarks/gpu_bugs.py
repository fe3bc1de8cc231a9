"""Bugs planted in copies of the extension, which tests on a GPU must catch.

Most are bugs that tests/cuda_on_cpu cannot show: there threads take turns, nothing is launched on a
stream and the host waits for everything. `gpu_build --prepare` builds them.
"""

from __future__ import annotations

import dataclasses


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
        "tests/optimizers/test_fused_rules.py -k 300_steps_equal_those_of_torch_in_float64",
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
