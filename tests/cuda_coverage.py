"""Run the operator tests on csrc/cuda, compiled for the host with gcov's counters (make coverage).

python tests/cuda_coverage.py FOLDER builds into FOLDER and leaves the counters there.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("cuda_on_cpu")))

from builder import build
from nets import NETS, PLAN, run

# Each line is counted by itself; what is returned is moved, as in the Makefile.
COUNTED = ["--coverage", "-O0", "-fno-elide-constructors"]


def main(out: Path) -> int:
    library = build(out.resolve(), sanitize=False, extra_flags=COUNTED)
    names = ("fused_rules_in_a_loop", "moments_in_a_byte", "narrow_moments", "split_masters")
    names += ("stochastic_rounding", "checked_steps")
    # The first unscales gradients in place, the others step tensors of many vectors.
    of_each = (
        ("core/test_ways_skips", "training_is_that_of_float32_without_the_skipped_steps"),
        *(
            ("optimizers/test_fused_rules", name)
            for name in (
                "each_group_is_clipped_by_the_norm_that_counts",
                "each_tensor_has_its_own_ratio",
                "parameters_whose_squares_are_beyond_float32_have_a_norm",
                "norms_are_averaged_from_the_first_gradient_or_from_zero",
            )
        ),
    )
    tests = [*PLAN[:2], *(f"tests/optimizers/test_{name}.py" for name in names)]
    tests += [f"tests/{file}.py::test_{name}" for file, name in of_each]
    stepper = dataclasses.replace(NETS["plan, forward"], tests=tests)
    for net in (NETS["wide grid, forward"], stepper):
        status, output = run(library, net, ["-q", "--every-case"])
        if status:
            print(output)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
