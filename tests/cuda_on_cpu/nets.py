"""The nets: which tests run on the CUDA kernels, with which grid, in which order of threads."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from builder import CXX, ROOT, Library

INSIDE = Path(__file__).resolve().parent / "inside"
OPERATORS = ("tests/operators/test_operators.py", f"{INSIDE}/test_chunk_edges.py")
STEP = tuple(f"{INSIDE}/test_step{name}.py" for name in ("", "_decisions", "_table"))
AROUND_OPERATORS = (
    "tests/operators/test_operator_errors.py",
    "tests/operators/test_operator_autograd.py",
    "tests/operators/test_conversions.py",
    f"{INSIDE}/test_large.py",
    f"{INSIDE}/test_step_large.py",
)
# The optimizers, whose steps the plan takes.
PLAN = (
    f"{INSIDE}/test_stepper.py",
    f"{INSIDE}/test_unwaited_steps.py",
    f"{INSIDE}/test_scaled_launches.py",
    *(
        f"tests/optimizers/test_fused_rules{name}.py"
        for name in ("_in_a_loop", "", "_call", "_state")
    ),
    "tests/optimizers/test_fused_sgd_in_wrappers.py",
    *(
        f"tests/optimizers/test_{name}.py"
        for name in (
            *("moments_in_a_byte", "narrow_moments", "split_masters", "stochastic_rounding"),
            "written_weights",
            *("checked_steps", "step_loss_scale", "step_plan_params"),
        )
    ),
    *(f"tests/core/test_ways_{name}.py" for name in ("gradients", "skips")),
    "tests/operators/test_step_lists.py",
    "tests/optimizers/test_unscaled_grads.py",
    *(
        f"tests/fp16_utils/test_fp16_optimizer_{name}.py"
        for name in ("accumulation", "clipping", "legacy", "masters", "overflow")
    ),
)
# What an ordinary test asks of the CPU and not of CUDA: that the host knows found_inf, and that
# the profiler sees passes by their names. And 2**32 numbers, which are too many here.
NOT_FOR_CUDA = (
    "tests/optimizers/test_checked_steps.py::test_a_step_after_a_check_reads_gradients_once_more",
    "tests/optimizers/test_split_masters.py::test_each_float32_is_kept",
    "tests/optimizers/test_fused_rules_in_a_loop.py::test_a_skipped_step_does_not_invalidate_a_graph",
    "tests/optimizers/test_unscaled_grads.py::test_a_gradient_that_is_written_has_a_new_version",
    "tests/core/test_ways_gradients.py::test_hooks_run_once_for_each_real_step",
    "tests/core/test_ways_skips.py::test_the_report_names_parameters_and_counts",
    "tests/optimizers/test_fused_rules.py::test_half_gradients_and_outputs_are_those_of_floats_rounded_once",
    "tests/optimizers/test_fused_sgd_in_wrappers.py::test_the_step_unscales_clips_and_copies_in_two_passes",
    "tests/fp16_utils/test_fp16_optimizer_clipping.py::test_clipping_costs_no_pass",
    "tests/fp16_utils/test_fp16_optimizer_masters.py::test_masters_gradients_cost_nothing_unlooked_at",
)


@dataclasses.dataclass(frozen=True)
class Net:
    """Arguments for pytest, and how the kernels run under its tests."""

    tests: tuple[str, ...]
    grid: str  # a key of builder.GRIDS
    order: str  # one of on_cuda_kernels.ORDERS


# A narrow table is full with a few hundred tensors; the 5000 fill a wide one, and take longest.
NARROW = (*OPERATORS, *STEP, "-k", "not 5000")

NETS = {
    "wide grid, forward": Net((*OPERATORS, *STEP, *AROUND_OPERATORS), "wide", "forward"),
    "plan, forward": Net(PLAN, "wide", "forward"),
    "narrow grid, backward": Net(NARROW, "narrow", "backward"),
    "narrow grid, shuffled": Net(NARROW, "narrow", "shuffled"),
}

SANITIZERS = {
    "ASAN_OPTIONS": {
        "abort_on_error": 1,
        "detect_leaks": 0,  # Python frees little when it ends.
        # Memory that nobody wrote yet holds NaN.
        "malloc_fill_byte": 255,
        "max_malloc_fill_size": 1 << 20,
    },
    "UBSAN_OPTIONS": {"halt_on_error": 1, "abort_on_error": 1, "print_stacktrace": 1},
}


def run(library: Library, net: Net, arguments: Sequence[str] = ()) -> tuple[int, str]:
    """Run pytest in a process whose operators on CPU tensors are those of `library`.

    Args:
        library: What builder.py made for the grid of the net.
        net: Tests and order.
        arguments: More arguments for pytest.

    Returns:
        The exit status (negative: the signal that ended it) and all that was printed. A sanitizer
        aborts, which is why pytest may capture nothing below Python and print each test's name
        before it runs.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--capture=sys", "--color=no"]
    command += ["-p", "on_cuda_kernels", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    command += ["-p", "no:hypothesispytest"]
    command += [f"--deselect={test}" for test in NOT_FOR_CUDA]
    done = subprocess.run(
        [*command, *arguments, *net.tests],
        cwd=ROOT,
        env=_environment(library, net),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


@dataclasses.dataclass(frozen=True)
class RunNet:
    """A job: run a net on csrc/ as it is."""

    net: Net
    arguments: tuple[str, ...] = ()

    def __call__(self, libraries: dict[str, Library]) -> tuple[int, str]:
        return run(libraries[self.net.grid], self.net, self.arguments)


def _environment(library: Library, net: Net) -> dict[str, str]:
    options = {
        name: ":".join(f"{key}={value}" for key, value in values.items())
        for name, values in SANITIZERS.items()
    }
    # libstdc++ too: AddressSanitizer looks for its exceptions when it is loaded.
    preloaded = [_runtime_library(name) for name in ("libasan.so", "libstdc++.so.6")]
    return {
        **os.environ,
        **options,
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONPATH": os.pathsep.join(map(str, (INSIDE, ROOT / "tests"))),
        "OMP_NUM_THREADS": "1",
        "CUDA_ON_CPU_LIBRARY": str(library.path),
        "CUDA_ON_CPU_ORDER": net.order,
    }


def _runtime_library(name: str) -> str:
    command = [CXX, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
