"""Twenty mutants of lines that were drawn at random among those that no other mutant changes."""

from __future__ import annotations

from mutant import Mutant

NO_INNER = 'not isinstance(inner, Mapping) or "param_groups" not in inner'

DRAWN = {
    "a state that hooks make is looked into": Mutant(
        "fp16_utils/_checkpoint.py", f"if {NO_INNER}:", f"if not ({NO_INNER}):",
        "fp16_optimizer_old_checkpoints",
    ),
    "dynamic_loss_scale=False is dynamic": Mutant(
        "fp16_utils/_given_scale.py", 'if is_true("dynamic_loss_scale", dynamic):',
        'if not is_true("dynamic_loss_scale", dynamic):', "given_loss_scale",
    ),
    "what --modernize imports stays": Mutant(
        "_run/modernize/packages.py",
        "replacements.at_undo(lambda: sys.meta_path.remove(finder))", "pass", "run_modernize",
    ),
    "there is no NCCL with --device cpu": Mutant(
        "_run/cpu/cuda_module.py", "if distributed.is_available():",
        "if not distributed.is_available():", "run_cpu",
    ),
    "the gradient of a master cannot be set": Mutant(
        "core/masters.py", "_TENSOR_GRAD.__set__(param, grad)", "pass", "fp16_optimizer_masters",
    ),
    "groups are adopted one by one until one is refused": Mutant(
        "fp16_utils/fp16_optimizer.py",
        'self._check_new(number, group["params"], group.get("param_names"))', "pass",
        "fp16_optimizer_misuse",
    ),
    "exponents are not counted": Mutant(
        "core/ops.py", "torch.ops.apex_mp.exponents_(tensors, counts)", "pass", "operators",
    ),
    "check says what works": Mutant(
        "_check/needs.py", "if sentence is not None:", "if sentence is None:", "check",
    ),
    "the first momentum is any but the first": Mutant(
        "optimizers/fused_sgd.py", "if flag is not None and flag.item():",
        "if not (flag is not None and flag.item()):", "fused_sgd_state",
    ),
    "all options but loss_scale are loss scales": Mutant(
        "amp/_options.py", 'if name == "loss_scale":', 'if name != "loss_scale":',
        "amp_initialize",
    ),
    "several devices measure what is not asked for": Mutant(
        "optimizers/_several_devices.py",
        "if not (check or self._must_measure(missing, clip_by_global_norm)):",
        "if check or self._must_measure(missing, clip_by_global_norm):", "several_devices",
    ),
    "strides of strided gradients are not matched": Mutant(
        "core/grads.py", "if grad.layout is not torch.strided:",
        "if grad.layout is torch.strided:", "step_plan_state",
    ),
    "a flat call calls nothing": Mutant(
        "core/flat_calls.py", "call(flat, *(extra_args or ()))", "pass", "parallel",
    ),
    "a scope is closed the other way round": Mutant(
        "amp/scopes.py", "if thread.optimizer_steps and not thread.off:",
        "if not (thread.optimizer_steps and not thread.off):", "amp_threads",
    ),
    "all but dicts are taken for dicts": Mutant(
        "core/flat_calls.py", "elif isinstance(maybe_tensor, dict):",
        "elif not isinstance(maybe_tensor, dict):", "parallel",
    ),
    "static_graph is turned round": Mutant(
        "parallel/distributed.py", "if self.static_graph:", "if not self.static_graph:",
        "parallel",
    ),
    "tensors of a checkpoint are not converted": Mutant(
        "convert.py", "if not torch.is_tensor(value):", "if torch.is_tensor(value):", "convert",
    ),
    "buffers stay in float32": Mutant(
        "fp16_utils/fp16util.py", "setattr(module, name, buffer.to(dtype))", "pass", "fp16util",
    ),
    "one norm for each group is refused": Mutant(
        "optimizers/_legacy_call.py", "if len(norms) != len(groups):",
        "if len(norms) == len(groups):", "fused_adam_legacy_call",
    ),
    "a clip is forgotten": Mutant(
        "amp/grad_scaler.py", "if clip is not None:", "if clip is None:", "grad_scaler_clip",
    ),
}  # fmt: skip
