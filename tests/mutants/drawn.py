"""Twenty mutants of lines that were drawn at random among those that no other mutant changes."""

from __future__ import annotations

from mutant import Mutant

DRAWN = {
    "a state that hooks make is looked into": Mutant(
        "_read_inner_state",
        "not isinstance(inner, Mapping) or 'param_groups' not in inner",
        "not (not isinstance(inner, Mapping) or 'param_groups' not in inner)",
        "fp16_optimizer_old_checkpoints",
    ),
    "dynamic_loss_scale=False is dynamic": Mutant(
        "new_scaler",
        "is_true('dynamic_loss_scale', dynamic)",
        "not is_true('dynamic_loss_scale', dynamic)",
        "given_loss_scale",
    ),
    "what --modernize imports stays": Mutant(
        "supply", "replacements.at_undo(lambda: sys.meta_path.remove(finder))", "", "run_modernize"
    ),
    "there is no NCCL with --device cpu": Mutant(
        "cuda_module.replace",
        "distributed.is_available()",
        "not distributed.is_available()",
        "run_cpu",
    ),
    "the gradient of a master cannot be set": Mutant(
        "store_grad", "_TENSOR_GRAD.__set__(param, grad)", "", "ways_gradients"
    ),
    "groups are adopted one by one until one is refused": Mutant(
        "FP16_Optimizer.__init__",
        "self._check_new(number, group['params'], group.get('param_names'))",
        "",
        "fp16_optimizer_misuse",
    ),
    "exponents are not counted": Mutant(
        "exponents_", "torch.ops.apex_mp.exponents_(tensors, counts)", "", "operators"
    ),
    "check says what works": Mutant(
        "unsupported", "sentence is not None", "sentence is None", "check"
    ),
    "the first momentum is any but the first": Mutant(
        "_Rule.tidy",
        "flag is not None and flag.item()",
        "not (flag is not None and flag.item())",
        "fused_rules_state",
    ),
    "all options but loss_scale are loss scales": Mutant(
        "_plain", "name == 'loss_scale'", "name != 'loss_scale'", "amp_initialize"
    ),
    "several devices measure what is not asked for": Mutant(
        "DevicePlans.run",
        "check or self._must_measure(missing, clip_by_global_norm)",
        "not (check or self._must_measure(missing, clip_by_global_norm))",
        "several_devices",
    ),
    "strides of strided gradients are not matched": Mutant(
        "match_strides",
        "grad.layout is not torch.strided",
        "grad.layout is torch.strided",
        "step_plan_state",
    ),
    "a flat call calls nothing": Mutant(
        "apply_flat_dist_call", "call(flat, *(extra_args or ()))", "", "parallel"
    ),
    "a scope is closed the other way round": Mutant(
        "Scopes._call_outermost",
        "thread.optimizer_steps and (not thread.off)",
        "not (thread.optimizer_steps and (not thread.off))",
        "amp_threads",
    ),
    "all but dicts are taken for dicts": Mutant(
        "extract_tensors",
        "isinstance(maybe_tensor, dict)",
        "not isinstance(maybe_tensor, dict)",
        "parallel",
    ),
    "static_graph is turned round": Mutant(
        "DistributedDataParallel._begin", "self.static_graph", "not self.static_graph", "parallel"
    ),
    "tensors of a checkpoint are not converted": Mutant(
        "masters", "not torch.is_tensor(value)", "torch.is_tensor(value)", "convert"
    ),
    "buffers stay in float32": Mutant(
        "convert_module", "setattr(module, name, buffer.to(dtype))", "", "fp16util"
    ),
    "one norm for each group is refused": Mutant(
        "_norm_per_group",
        "len(norms) != len(groups)",
        "len(norms) == len(groups)",
        "fused_rules_call",
    ),
    "a clip is forgotten": Mutant(
        "_step_ours",
        "None if clip is None else clip.max_norm",
        "None",
        "ways_gradients",
    ),
}
