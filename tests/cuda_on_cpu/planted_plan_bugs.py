"""Bugs planted where the step plan meets CUDA: csrc/cuda/step/stepper.cpp, csrc/plan/."""

from __future__ import annotations

from nets import INSIDE
from planted_bugs import WRONG_BITS, PlantedBug

STEPPER = f"{INSIDE}/test_stepper.py"
UNSCALED = "tests/optimizers/test_unscaled_grads.py"
RULES = "tests/optimizers/test_fused_rules.py"
RATIOS = f"{RULES}::test_each_tensor_has_its_own_ratio"
NET = "plan, forward"
NOT_NEAR = r"assert \S+ == \S+ ± "
NOT_REFUSED = "Failed: DID NOT RAISE"
FREED = r"AddressSanitizer: heap-use-after-free"

CHECKED = "tests/optimizers/test_checked_steps.py"
WRITTEN = "tests/optimizers/test_written_weights.py"
SPLIT = "tests/optimizers/test_split_masters.py"
ROUNDING = "tests/optimizers/test_stochastic_rounding.py"
SAME_BITS = f"{ROUNDING}::test_random_bits_are_those_of_the_hash"
APART = f"{ROUNDING}::test_no_two_roundings_have_to_do_with_each_other"

PLANTED_PLAN_BUGS = {
    "a remainder counts steps of another size": PlantedBug(
        "from_bits(size, number_t()) + steps * number_t(0x1p-40f)",
        "from_bits(size, number_t()) + steps * number_t(0x1p-39f)",
        f"{SPLIT}::test_each_exponent_and_each_edge_is_kept",
        "assert",
        net=NET,
    ),
    "a remainder loses its sign": PlantedBug(
        "static_cast<uint32_t>(static_cast<int16_t>(remainder))",
        "static_cast<uint32_t>(remainder)",
        f"{SPLIT}::test_each_exponent_and_each_edge_is_kept",
        "assert",
        net=NET,
        scope="float join(float weight, uint16_t remainder, DType",
    ),
    "a weight that was written does not count": PlantedBug(
        "part.copy_counts = facts.copy_counts;",
        "part.copy_counts = false;",
        f"{WRITTEN}::test_training_goes_on_from_written_weights -k whole",
        "assert",
        net=NET,
    ),
    "a remainder of another weight counts": PlantedBug(
        "held(math::join_float16(weight, floats), weight, DType::kHalf)",
        "math::join_float16(weight, floats)",
        f"{WRITTEN}::test_any_remainder_beside_a_weight_is_a_master_that_rounds_to_it",
        "assert",
        net=NET,
    ),
    "a skipped step writes weights and remainders": PlantedBug(
        "  if (memory.outcome->found_inf != 0.0f) return;\n  const StepChunk chunk",
        "  const StepChunk chunk",
        f"{SPLIT}::test_scaled_clipped_and_skipped_steps_are_those_of_float32_masters",
        "assert",
        net=NET,
    ),
    "each step rounds with the same random numbers": PlantedBug(
        "math::stochastic_rounding(row.position, *global(row.numbers[0]))",
        "math::stochastic_rounding(row.position, 0.0f)",
        APART,
        "assert",
        net=NET,
    ),
    "each parameter rounds with the same random numbers": PlantedBug(
        "bits_of(step), static_cast<uint32_t>(position), 0u",
        "bits_of(step), 0u, 0u",
        APART,
        "assert",
        net=NET,
    ),
    "both moments round with the same random numbers": PlantedBug(
        "tensor == 0 ? random & 0xffffu : random >> 16",
        "random & 0xffffu",
        APART,
        "assert",
        net=NET,
    ),
    "each chunk rounds with the same random numbers": PlantedBug(
        "static_cast<uint32_t>(first)}",
        "0u}",
        SAME_BITS,
        WRONG_BITS,
        net=NET,
    ),
    "vectors of a thread round with the same random numbers": PlantedBug(
        "how.first + index + n / kWidth * span.kStride + n % kWidth",
        "how.first + index + n % kWidth",
        SAME_BITS,
        WRONG_BITS,
        net=NET,
    ),
    "a table is kept that does not fit": PlantedBug(
        "if (!fits && !impl_->take_back(task)) impl_->build(task, current);",
        "if (!impl_->resident.has_value()) impl_->build(task, current);",
        f"{STEPPER}::test_a_state_that_has_moved_is_stepped_where_it_is",
        rf"{FREED}|AddressSanitizer|{WRONG_BITS}",
        net=NET,
    ),
    "a table is freed that a graph replays": PlantedBug(
        "replayed.push_back(std::move(*resident));",
        "replayed.clear();",
        f"{STEPPER}::test_a_graph_outlives_steps_unlike_it",
        FREED,
        net=NET,
    ),
    "each change leaves a graph another table": PlantedBug(
        "if (!old.table.fits(task)) continue;",
        "continue;",
        f"{STEPPER}::test_a_table_that_a_graph_has_is_taken_back_when_it_fits_again",
        r"assert .*data_ptr\(\) == ",
        net=NET,
    ),
    "a table is used again whose launches failed": PlantedBug(
        "  resident.ready = false;\n",
        "",
        f"{STEPPER}::test_a_step_after_one_whose_second_launch_failed_is_sound",
        r"AssertionError|assert ",
        net=NET,
    ),
    "a parameter without a gradient has no row": PlantedBug(
        "return read_without_grad(item, given, source, row);",
        "return false;",
        f"{STEPPER}::test_the_table_stays_while_gradients_come_and_go",
        r"assert .*data_ptr\(\) == ",
        net=NET,
    ),
    "a parameter that is not stepped has a new version": PlantedBug(
        "    if (grad == nullptr) return;\n",
        "",
        f"{STEPPER}::test_the_table_stays_while_gradients_come_and_go",
        r"assert \(",
        net=NET,
        scope="void each_written(",
    ),
    "no stream waits for the other": PlantedBug(
        "    wait_for(*stream, current);\n",
        "",
        f"{STEPPER}::test_steps_on_one_stream_wait_for_those_on_the_other",
        r"cuda_on_cpu: a kernel on stream 1 does not wait for stream 0",
        net=NET,
    ),
    "a refresh does not wait for the other stream": PlantedBug(
        "  impl_->follow(current);\n  impl_->refresh(",
        "  impl_->refresh(",
        f"{STEPPER}::test_a_new_table_and_new_options_wait_for_steps_on_the_other_stream",
        r"cuda_on_cpu: a kernel on stream 0 does not wait for stream 1",
        net=NET,
    ),
    "the outcome is read where it is not": PlantedBug(
        "narrow(0, table.outcome_offset(), ",
        "narrow(0, 0, ",
        f"{STEPPER}::test_the_host_hears_of_norms_and_of_inf",
        r"AssertionError|assert ",
        net=NET,
    ),
    "a step that the host waits for is captured": PlantedBug(
        "TORCH_CHECK(!wait,",
        "TORCH_CHECK(true,",
        f"{STEPPER}::test_a_step_of_which_the_host_wants_to_hear_cannot_be_captured",
        NOT_REFUSED,
        net=NET,
    ),
    "changed options are captured": PlantedBug(
        "impl_->resident->ready && impl_->resident->table.knows_groups(task),",
        "impl_->resident->ready,",
        f"{STEPPER}::test_a_step_unlike_the_last_one_cannot_be_captured -k lr",
        NOT_REFUSED,
        net=NET,
    ),
    "a step of one plan alone cannot be captured": PlantedBug(
        "if (run.captured && !once) {",
        "if (run.captured) {",
        f"{STEPPER}::test_a_step_over_lists_is_captured_with_its_table",
        "cannot be captured in a CUDA graph",
        net=NET,
    ),
    "the step leaves the loss scale as it is": PlantedBug(
        "  run.loss_scale = loss_scale;\n",
        "",
        "tests/optimizers/test_step_loss_scale.py::test_a_step_updates_it_by_the_rule_of_the_host",
        r"assert scale\.read\(\) == rule",
        net=NET,
    ),
    "found_inf is that of the last step": PlantedBug(
        "  task_.found_inf = nullptr;\n",
        "",
        "tests/optimizers/test_fused_rules_in_a_loop.py::test_a_plain_step_after_a_skipped_one_is_taken",
        FREED,
        net=NET,
        scope="bool Plan::read_found_inf(",
    ),
    "a check of gradients is used after they were written": PlantedBug(
        "tensor.is(*row.grad)",
        "true",
        f"{CHECKED}::test_what_changes_in_between_counts -k one-write_a_gradient",
        "assert",
        net=NET,
    ),
    "a check of gradients is used after options have changed": PlantedBug(
        "groups_ == task.groups",
        "true",
        f"{CHECKED}::test_what_changes_in_between_counts -k one-set_max_norm",
        "assert",
        net=NET,
    ),
    "a step after a check does not clip": PlantedBug(
        "excess > 1.0 ?",
        "excess > 1e9 ?",
        f"{CHECKED}::test_clipping_is_that_of_torch",
        "assert|not close",
        net=NET,
    ),
    "numbers on the device are freed before the step": PlantedBug(
        "  kept_.push_back(here);\n",
        "",
        f"{STEPPER}::test_an_lr_that_is_converted_for_the_step_lives_as_long",
        FREED,
        net=NET,
    ),
    "a shared gradient is unscaled twice": PlantedBug(
        "separate_shared_grads(caller_, tensors_, task_.rows, kept_);",
        ";",
        f"{UNSCALED}::test_a_shared_gradient_is_unscaled_once -k adam",
        r"AssertionError|assert ",
        net=NET,
    ),
    "a copy of a gradient is unscaled in its place": PlantedBug(
        "for (const auto& [grad, laid] : laid_anew_) grad.copy_(laid);",
        "",
        f"{UNSCALED}::test_a_gradient_in_another_order_is_unscaled_where_it_lies -k adam",
        WRONG_BITS,
        net=NET,
    ),
    "a table is kept that does not write gradients": PlantedBug(
        " &&\n           one.writes_grad == other.writes_grad));",
        "));",
        f"{UNSCALED}::test_the_option_may_change_between_steps -k adam",
        r"AssertionError|assert ",
        net=NET,
    ),
    "an empty gradient is none": PlantedBug(
        "if (grad.data == nullptr) grad.data = &somewhere;",
        "",
        f"{STEPPER}::test_steps_of_an_empty_parameter_are_counted",
        r"AssertionError|assert ",
        net=NET,
    ),
    # --- norms of parameters and updates
    "the sums of a chunk are taken for those of another": PlantedBug(
        "memory.measured[index] = sums;",
        "memory.measured[blockIdx.x] = sums;",
        RATIOS,
        NOT_NEAR,
        net=NET,
    ),
    "the ratio of a row is that of its first chunk": PlantedBug(
        "i < end_of_row(memory, row);",
        "i < memory.rows[row].first_chunk + 1;",
        RATIOS,
        NOT_NEAR,
        net=NET,
    ),
    "all rows have the ratio of the first": PlantedBug(
        "memory.groups[memory.rows[row].group], row, Rule::kRatio,",
        "memory.groups[memory.rows[row].group], 0, Rule::kRatio,",
        RATIOS,
        NOT_NEAR,
        net=NET,
    ),
    "gradients are measured instead of updates": PlantedBug(
        "      g[n] = Rule::direction(p[n], numbers, g[n], factors);",
        "      Rule::direction(p[n], numbers, g[n], factors);",
        RATIOS,
        NOT_NEAR,
        net=NET,
    ),
    "squares beyond float32 are infinite": PlantedBug(
        "if (math::not_finite(sum)) {\n      double wide = 0.0;",
        "if (false) {\n      double wide = 0.0;",
        f"{RULES}::test_parameters_whose_squares_are_beyond_float32_have_a_norm",
        r"AssertionError|assert ",
        net=NET,
    ),
}
