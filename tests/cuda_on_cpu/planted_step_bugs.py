"""Bugs planted into the fused step of csrc/cuda/step/."""

from __future__ import annotations

from nets import INSIDE
from planted_bugs import UNDEFINED, WRONG_BITS, PlantedBug

STEP = f"{INSIDE}/test_step.py"
DECISIONS = f"{INSIDE}/test_step_decisions.py"
TABLE = f"{INSIDE}/test_step_table.py"

ONE_STEP = f"{STEP}::test_a_step_is_exact -k fp32-fp16-fp16"
UNSCALED = f"{STEP}::test_gradients_are_left_unscaled -k aligned"
STEPS = f"{STEP}::test_steps_follow_each_other"
MANY_ROWS = f"{STEP}::test_more_rows_than_one_launch_takes_are_stepped -k 5000-checked"
CLIPPING = f"{DECISIONS}::test_gradients_are_clipped"
FIRST_GRADIENT = f"{STEP}::test_the_first_gradient_of_a_buffer_is_not_dampened"
OVERFLOWS = f"{DECISIONS}::test_inf_and_nan_change_nothing_but_the_loss_scale"
LOSS_SCALES = f"{DECISIONS}::test_the_loss_scale_is_that_of_the_host_to_the_bit"

WRONG_NUMBER = r"AssertionError: \S+ is not \S+"
# Far behind may lie what another array was.
READ_BEHIND = r"AddressSanitizer: (heap-buffer-overflow|heap-use-after-free|SEGV)"

PLANTED_STEP_BUGS = {
    # --- blocks that come to an end
    "the count of blocks is not reset": PlantedBug(
        "atomicInc(arrived, blocks - 1) == blocks - 1;",
        "atomicInc(arrived, 0xffffffffu) == blocks - 1;",
        LOSS_SCALES,
        r"assert outcome\.loss_scale == ",
    ),
    "each launch has a last block": PlantedBug(
        "check.all_blocks += blocks_of(check, reads_grads);",
        "check.all_blocks = blocks_of(check, reads_grads);",
        MANY_ROWS,
        WRONG_NUMBER,
    ),
    "threads do not wait to hear whether theirs is the last block": PlantedBug(
        "  }\n  __syncthreads();\n",
        "  }\n",
        STEPS,
        UNDEFINED + "load of value 255, which is not a valid value for type 'bool'",
        net="narrow grid, backward",
        scope="bool is_last_block(",
    ),
    "groups are decided on before their totals are there": PlantedBug(
        "if (threadIdx.x == 0) add_up_groups(check, totals);\n  __syncthreads();",
        "if (threadIdx.x == 0) add_up_groups(check, totals);",
        CLIPPING,
        WRONG_NUMBER,
        net="narrow grid, backward",
    ),
    "the scale is read after its update": PlantedBug(
        "totals.scale, totals.norm, {}};",
        "value_of(decision.scale), totals.norm, {}};",
        LOSS_SCALES,
        r"assert outcome\.scale == scale",
    ),
    "one row is named again and again": PlantedBug(
        "if (row < begin || ",
        "if (",
        f"{DECISIONS}::test_the_first_rows_with_inf_or_nan_are_named -k 2",
        r"assert outcome\.nonfinite_rows == ",
    ),
    "rows are numbered as if all had gradients": PlantedBug(
        "number_with_grad(memory, row);",
        "row;",
        f"{DECISIONS}::test_rows_with_inf_or_nan_are_numbered_among_those_with_a_gradient",
        r"assert .*nonfinite_rows == ",
    ),
    "the last gradient is not carried": PlantedBug(
        "std::copy_n(check.carried, check.carried_bytes(), few.carried);",
        "std::copy_n(check.carried, check.carried_bytes() - 8, few.carried);",
        ONE_STEP,
        rf"{WRONG_BITS}|{READ_BEHIND}|{UNDEFINED}",
    ),
    "what is carried lies in the padding before it": PlantedBug(
        "alignas(16) char carried[kBytes];",
        "char carried[kBytes];",
        ONE_STEP,
        rf"{READ_BEHIND}|{UNDEFINED}|assert outcome\.found_inf == 0",
    ),
    "all launches carry few gradients": PlantedBug(
        "if (check.carried_bytes() <= kFewTableBytes) {",
        "if (check.carried_bytes() >= 0) {",
        MANY_ROWS,
        r"AddressSanitizer: (stack-buffer-overflow|memcpy-param-overlap)",
    ),
    "an overflow is found again in the next step": PlantedBug(
        "  control.found_inf = 0;\n",
        "",
        f"{OVERFLOWS} -k inf",
        r"assert outcome\.found_inf == 0",
    ),
    "pass 2 does not look whether to step": PlantedBug(
        "if (memory.outcome->found_inf != 0.0f) return;",
        "",
        f"{OVERFLOWS} -k inf",
        WRONG_BITS,
    ),
    # --- which numbers a block takes
    "pass 2 begins one chunk too late": PlantedBug(
        "memory.chunks[update.end_chunk - 1 - static_cast",
        "memory.chunks[update.end_chunk - static_cast",
        ONE_STEP,
        READ_BEHIND,
    ),
    "pass 2 leaves the first chunk out": PlantedBug(
        "launch(kernel, std::min(end, kMaxBlocks), stream,",
        "launch(kernel, std::min(end, kMaxBlocks) - 1, stream,",
        ONE_STEP,
        WRONG_BITS,
    ),
    "pass 2 takes chunks to be of the largest size": PlantedBug(
        "part_of<Rule>(row, grad, chunk, memory.counts.chunk_size);",
        "part_of<Rule>(row, grad, chunk, kLargestChunk);",
        f"{STEP}::test_a_step_has_chunks_of_each_size",
        READ_BEHIND,
    ),
    "pass 1 takes chunks to be of the largest size": PlantedBug(
        "part_of(chunk, check.memory.counts.chunk_size, grad);",
        "part_of(chunk, kLargestChunk, grad);",
        f"{STEP}::test_a_step_has_chunks_of_each_size",
        READ_BEHIND,
    ),
    "only the last array decides which vectors are aligned": PlantedBug(
        "heads &= aligned_heads<kWidth>(array);",
        "heads = aligned_heads<kWidth>(array);",
        f"{STEP}::test_every_pair_of_offsets_is_stepped",
        UNDEFINED + r"(load of|store to|reference binding to) misaligned address",
    ),
    "gradients are read where they were": PlantedBug(
        "grads[i] = task.rows[check.first_row + i].grad.data;",
        "grads[i] = rows_[check.first_row + i].grad.data;",
        STEPS,
        r"AddressSanitizer: heap-use-after-free|" + WRONG_BITS,
    ),
    # --- sums over chunks
    "a missing gradient leaves its old sum": PlantedBug(
        "  if (check.decision.sums) {\n",
        "  if (check.decision.sums && grad_of(check, chunk.row) != nullptr) {\n",
        f"{STEP}::test_a_row_without_a_gradient_is_left_alone",
        WRONG_NUMBER,
    ),
    "groups beyond the number of warps are not summed": PlantedBug(
        "group += kBlockSize / kWarpSize) {",
        "group += kBlockSize) {",
        f"{TABLE}::test_many_groups_may_change_at_once -k 40-checked",
        WRONG_NUMBER,
    ),
    "a group of many chunks is summed by its first warp alone": PlantedBug(
        "sum_chunks(memory.chunk_sums, chunks, threadIdx.x, kBlockSize);",
        "sum_chunks(memory.chunk_sums, chunks, lane, kBlockSize);",
        f"{STEP}::test_a_group_of_more_chunks_than_a_warp_takes_is_summed",
        WRONG_NUMBER,
    ),
    # --- what a row is stepped with
    "plain gradients are unscaled": PlantedBug(
        "chunk.facts.scaled ? outcome.scaled_factor : outcome.plain_factor",
        "outcome.scaled_factor",
        ONE_STEP,
        WRONG_BITS,
    ),
    "all groups have the factors of the first": PlantedBug(
        "memory.group_outcomes[group];",
        "memory.group_outcomes[0 * group];",
        f"{CLIPPING} -k unchecked-each",
        WRONG_BITS,
    ),
    "all groups are clipped by their own norm": PlantedBug(
        "if (check.decision.clip_by_global_norm) clipped = totals.sums;",
        "",
        f"{CLIPPING} -k unchecked-global",
        WRONG_NUMBER,
    ),
    "gradients are left clipped": PlantedBug(
        "inv_scale = 1.0 / memory.outcome->scale;",
        "inv_scale = factors.inv_scale;",
        UNSCALED,
        WRONG_BITS,
    ),
    "gradients are unscaled that are only to be read": PlantedBug(
        "chunk.facts.writes_grad ? ",
        "chunk.facts.scaled ? ",
        UNSCALED,
        WRONG_BITS,
    ),
    "the step reads gradients that it has unscaled": PlantedBug(
        "    write_unscaled(g, unscaled, index, span);\n",
        "    write_unscaled(g, unscaled, index, span);\n    read(grad, index, span, g);\n",
        UNSCALED,
        WRONG_BITS,
    ),
    "bias corrections are those of the step before": PlantedBug(
        "options[which], numbers[0] + 1.0f);",
        "options[which], numbers[0]);",
        ONE_STEP,
        WRONG_BITS,
        scope="struct Adam : RuleBase",
    ),
    "each block counts a step": PlantedBug(
        "if (chunk.index == 0) advance_numbers",
        "advance_numbers",
        f"{ONE_STEP} and adam",
        WRONG_BITS,
    ),
    "flags of fresh buffers stay": PlantedBug(
        "if (row.numbers[i] == nullptr) continue;",
        "if (!Rule::kNeedsNumbers) continue;",
        FIRST_GRADIENT,
        r"assert \[1\.0, .*\] == \[0\.0",
    ),
    "a skipped step clears flags": PlantedBug(
        "  if (memory.outcome->found_inf != 0.0f) return;\n"
        "  const StepChunk chunk = memory.chunks[update.end_chunk - 1 - "
        "static_cast<int32_t>(blockIdx.x)];\n",
        "  const StepChunk chunk = memory.chunks[update.end_chunk - 1 - "
        "static_cast<int32_t>(blockIdx.x)];\n"
        "  if constexpr (!Rule::kNeedsNumbers) {\n"
        "    if (chunk.index == 0 && threadIdx.x == 0) "
        "advance_numbers<Rule>(memory.rows[chunk.row], memory.prepared[chunk.row]);\n"
        "  }\n"
        "  if (memory.outcome->found_inf != 0.0f) return;\n",
        FIRST_GRADIENT,
        r"assert \[0\.0, .*\] == \[1\.0",
    ),
    "flags are read when they may be cleared": PlantedBug(
        "  return Rule::factors(options.options, value_of(options.lr), "
        "memory.prepared[chunk.row].numbers,\n",
        "  double prepared[math::kMaxPrepared];\n"
        "  for (int i = 0; i < math::kMaxPrepared; ++i) "
        "prepared[i] = memory.prepared[chunk.row].numbers[i];\n"
        "  if (!Rule::kNeedsNumbers && memory.rows[chunk.row].numbers[0] != nullptr) "
        "prepared[0] = *memory.rows[chunk.row].numbers[0];\n"
        "  return Rule::factors(options.options, value_of(options.lr), prepared,\n",
        FIRST_GRADIENT,
        WRONG_BITS,
    ),
    "a number that is not there is taken for 1": PlantedBug(
        "  float numbers[math::kMaxNumbers] = {};\n",
        "  float numbers[math::kMaxNumbers] = {1.0f, 1.0f};\n",
        f"{ONE_STEP} and sgd",
        WRONG_BITS,
    ),
    "all rows have what is prepared for the first": PlantedBug(
        "value_of(options.lr), memory.prepared[chunk.row].numbers,",
        "value_of(options.lr), memory.prepared[0].numbers,",
        ONE_STEP,
        WRONG_BITS,
    ),
    "only the first number is prepared": PlantedBug(
        "if (which < Rule::kPrepared && which",
        "if (which < 1 && which",
        f"{ONE_STEP} and adam",
        WRONG_BITS,
    ),
    "the last tensor of state is left out": PlantedBug(
        "    for (int i = 0; i < Rule::kTensors; ++i) {\n      if (is_there(i)) store",
        "    for (int i = 0; i < Rule::kTensors - 1; ++i) {\n      if (is_there(i)) store",
        f"{ONE_STEP} and sgd",
        WRONG_BITS,
    ),
    "the dtypes of two tensors of state are mixed": PlantedBug(
        "bits(row.tensors[0]) | bits(row.tensors[1]) << kDTypeBits,",
        "bits(row.tensors[1]) | bits(row.tensors[0]) << kDTypeBits,",
        f"{STEP}::test_a_step_takes_any_dtypes -k sgd",
        rf"{WRONG_BITS}|{READ_BEHIND}|{UNDEFINED}",
    ),
    "a momentum buffer that is not there is written": PlantedBug(
        "      if (is_there(i)) store<cache>(tensors[i], state[i], index, span);",
        "      store<cache>(tensors[i], state[i], index, span);",
        f"{STEP}::test_sgd_has_every_mode -k momentum",
        UNDEFINED + r"(store to null pointer|applying non-zero offset)",
    ),
    "a state that is not there is read": PlantedBug(
        "static constexpr bool kAllTensors = false;",
        "static constexpr bool kAllTensors = true;",
        f"{ONE_STEP} and sgd",
        rf"{READ_BEHIND}|{UNDEFINED}",
    ),
    "the rule of the step is not that of the task": PlantedBug(
        "                             rule_,\n",
        "                             0,\n",
        f"{ONE_STEP} and sgd",
        rf"{WRONG_BITS}|{READ_BEHIND}|{UNDEFINED}",
    ),
    "options of one rule are taken for those of another": PlantedBug(
        "options[kNesterov] != 0.0};",
        "options[kNesterov + 1] != 0.0};",
        f"{STEP}::test_sgd_has_every_mode",
        WRONG_BITS,
    ),
    "a changed option at the end is overlooked": PlantedBug(
        "std::equal(one.options, std::end(one.options), other.options)",
        "std::equal(one.options, std::end(one.options) - 5, other.options)",
        f"{TABLE}::test_a_changed_option_counts_at_once -k wd_after_momentum",
        r"assert not .*knows_groups",
    ),
    "a table is kept whose flags have gone": PlantedBug(
        "std::equal(one.numbers, std::end(one.numbers), other.numbers) && one.size",
        "one.size",
        f"{TABLE}::test_a_table_does_not_fit_what_has_moved -k number",
        r"assert not .*fits",
        scope="bool same_row(",
    ),
    "options are read while they are written": PlantedBug(
        "if (carried < 0 || carried >= check.groups) return",
        "return",
        f"{TABLE}::test_a_changed_option_counts_at_once -k beta1-unchecked",
        WRONG_BITS,
    ),
    "the groups of the last step are forgotten": PlantedBug(
        "    remember(task.groups);\n    if (changed",
        "    if (changed",
        f"{TABLE}::test_a_changed_option_counts_at_once -k lr-unchecked",
        r"assert step\.knows_groups\(task\)",
    ),
    # --- the table on its way to the device
    "a part of the table lands on another": PlantedBug(
        "static_cast<char*>(memory) + first);",
        "static_cast<char*>(memory) + begin);",
        MANY_ROWS,
        rf"{READ_BEHIND}|{UNDEFINED}",
    ),
    "the end of a part is left out": PlantedBug(
        "count_chunks(part.words, kBlockSize)",
        "part.words / kBlockSize",
        STEPS,
        rf"{WRONG_BITS}|{READ_BEHIND}|{UNDEFINED}",
    ),
    "refreshed groups are those of before": PlantedBug(
        "  remember(task.groups);\n  upload_groups(memory, stream);",
        "  upload_groups(memory, stream);\n  remember(task.groups);",
        f"{TABLE}::test_a_replay_sees_groups_that_were_refreshed_and_no_others",
        WRONG_BITS,
    ),
}
