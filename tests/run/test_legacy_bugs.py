"""Which test holds each bug of the old API away. The numbers are those of our list of them.

A test that is renamed has to be renamed here, too.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

TESTS = Path(__file__).parents[1]
ACCUMULATION = "test_fp16_optimizer_accumulation.py"
CHECKPOINTS = "test_fp16_optimizer_checkpoints.py"
LEGACY = "test_fp16_optimizer_legacy.py"
MASTERS = "test_fp16_optimizer_masters.py"
OVERFLOW = "test_fp16_optimizer_overflow.py"
ADAM = "test_fused_rules.py"
FUNCTIONS = "test_fp16util.py"
FILES, GRADIENTS, SKIPS = (f"test_ways_{name}.py" for name in ("files", "gradients", "skips"))
PARALLEL = "test_parallel.py"
PROCESSES = "test_two_processes.py"
SCALERS = "test_loss_scaler_faces.py"

# (the number, what went wrong): the tests that fail if it does again.
FIXED: dict[tuple[int, str], list[tuple[str, str]]] = {
    (1, "fp32 gradients inside FP16_Optimizer were divided by the scale at every backward"): [
        (ACCUMULATION, "test_backward_calls_add_up_whenever_master_grads_are_updated"),
    ],
    (2, "a static loss scale wrote inf into the weights"): [
        (SKIPS, "test_an_overflow_changes_nothing_but_the_scale"),
    ],
    (17, "large finite gradients whose sum is infinite were taken for an overflow"): [
        (SKIPS, "test_finite_gradients_whose_sum_is_infinite_are_no_overflow"),
        (SCALERS, "test_has_overflow_is_not_fooled_by_finite_gradients_whose_sum_is_infinite"),
    ],
    (18, "the check stopped at the first overflow and left later gradients scaled"): [
        (OVERFLOW, "test_an_overflow_leaves_every_other_gradient_unscaled"),
    ],
    (20, "scale_factor was ignored"): [
        (LEGACY, "test_the_dynamic_state_may_be_read_and_written"),
        (SCALERS, "test_written_attributes_decide_the_next_update"),
    ],
    (24, "state_dict() returned the masters themselves, which went on changing"): [
        (CHECKPOINTS, "test_saved_masters_are_copies"),
    ],
    (24, "loading took as many masters as there were in the shorter list"): [
        (CHECKPOINTS, "test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing"),
    ],
    (25, "FP16_Optimizer reordered the parameters and dropped frozen ones"): [
        (MASTERS, "test_low_precision_parameters_get_masters_in_place"),
    ],
    (25, "FP16_Optimizer made the inner optimizer anew, without what it knew"): [
        (MASTERS, "test_low_precision_parameters_get_masters_in_place"),
        (MASTERS, "test_what_the_inner_optimizer_knew_moves_to_the_masters"),
    ],
    (26, "a gradient that is None crashed the fused FP16_Optimizer"): [
        (GRADIENTS, "test_parameters_without_gradients_stay_as_they_are"),
    ],
    (26, "the fused FP16_Optimizer took no inner optimizer but FusedAdam"): [
        (LEGACY, "test_a_foreign_optimizer_without_the_legacy_call_reads_grads"),
    ],
    (26, "the fused FP16_Optimizer took no empty group"): [
        (MASTERS, "test_a_group_may_be_empty"),
    ],
    (26, "a model moved or cast after wrapping was not trained any more"): [
        (MASTERS, "test_a_model_that_is_moved_or_cast_after_wrapping_is_still_trained"),
    ],
    (27, "FusedAdam ignored weight_decay, or multiplied it by the corrected step size"): [
        (ADAM, "test_300_steps_equal_those_of_torch_in_float64_with_states_exchanged"),
    ],
    (27, "FusedAdam with max_grad_norm and without grad_norms raised a TypeError"): [
        (ADAM, "test_each_group_is_clipped_by_the_norm_that_counts"),
    ],
    (28, "state_dict() of the fused FP16_Optimizer read an attribute that was not there"): [
        (FILES, "test_a_run_goes_on_from_a_file_to_the_bit"),
    ],
    (29, "FP16Model halved integers and took no keyword arguments"): [
        (FUNCTIONS, "test_fp16model_casts_floating_inputs_only_wherever_they_are"),
    ],
    (30, "network_to_half and FP16Model changed the keys of state_dict()"): [
        (FUNCTIONS, "test_a_wrapped_network_saves_its_own_keys_and_loads_old_ones_too"),
    ],
    (32, "gradient_average_split_factor was overwritten after it had been set"): [
        (PROCESSES, "test_gradients_are_averaged_as_the_arguments_say"),
    ],
    (32, "DistributedDataParallel could not be pickled: it deleted keys that were not there"): [
        (PROCESSES, "test_a_pickled_model_keeps_its_arguments"),
        (PARALLEL, "test_a_deepcopied_model_has_switches_of_its_own"),
    ],
    (32, "errors of DistributedDataParallel had two arguments instead of a sentence"): [
        (PARALLEL, "test_what_cannot_be_is_refused_before_anything_is_sent"),
    ],
    (33, "SyncBatchNorm with channel_last used a name that was not there in evaluation"): [
        (PARALLEL, "test_sync_batch_norm_evaluates_channels_last"),
        ("test_sync_batchnorm.py", "test_evaluation_is_each_process_for_itself"),
    ],
    (33, "SyncBatchNorm needed a process group"): [
        (PARALLEL, "test_sync_batch_norm_needs_no_process_group"),
    ],
    (35, "FusedAdam could not load the state of torch.optim.Adam"): [
        (ADAM, "test_300_steps_equal_those_of_torch_in_float64_with_states_exchanged"),
    ],
}
# What looks like a bug and stays, because networks rely on it.
KEPT: dict[tuple[int, str], list[tuple[str, str]]] = {
    (31, "a batch norm without affine parameters becomes half"): [
        (FUNCTIONS, "test_affine_batch_norms_stay_in_float32_and_the_rest_becomes_half"),
    ],
}


def test_a_bug_of_the_old_api_has_its_test() -> None:
    for file, name in itertools.chain.from_iterable((FIXED | KEPT).values()):
        tree = ast.parse(next(TESTS.glob(f"*/{file}")).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"
