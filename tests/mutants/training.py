"""Wrong lines for fp16_utils/ and optimizers/."""

from __future__ import annotations

from mutant import Mutant

FP16_UTILS = {
    "a legacy step gets no loss scale": Mutant(
        "_step_legacy", "float(scale)", "1.0", "ways_gradients"
    ),
    "a backward that raised leaves scaled gradients": Mutant(
        "FP16_Optimizer.backward",
        "self._grads.abandon_backward()",
        "",
        "ways_gradients",
    ),
    "clipping after a step is undone": Mutant(
        "FP16_Optimizer.clip_master_grads",
        "self._grads.accept_edits()",
        "",
        "fp16_optimizer_accumulation",
    ),
    "inf of an edit is not noticed": Mutant(
        "_overflow_now", "owner._overflow = None", "", "fp16_optimizer_overflow"
    ),
    "a global norm is each group's own": Mutant(
        "_step_legacy",
        "norms = [math.hypot(*norms)] * len(norms)",
        "",
        "fp16_optimizer_clipping",
    ),
    "masters without a gradient are not written": Mutant(
        "_step_fused",
        "write([(model, master) for model, master in places if model is not None])",
        "",
        "fp16_optimizer_masters",
    ),
    "a line search sees old weights": Mutant(
        "_evaluate", "owner._masters.copy_to_model()", "", "fp16_optimizer_accumulation"
    ),
    "FP16_Optimizer keeps an abandoned line search": Mutant(
        "step_with_closure",
        "before.restore(owner.optimizer.state)",
        "",
        "fp16_optimizer_accumulation",
    ),
    "skips are counted over good steps": Mutant(
        "StepRecord.end",
        "self.skips_in_a_row + 1 if skipped else 0",
        "self.skips_in_a_row + skipped",
        "ways_skips",
    ),
    "a skipped step is no step for schedulers": Mutant(
        "StepRecord.end", "_mark_step_called(self._optimizer())", "", "ways_gradients"
    ),
    "the first overflow is dated one step late": Mutant(
        "DynamicLossScaler.update_scale",
        "self.last_overflow_iter = self.cur_iter",
        "self.last_overflow_iter = self.cur_iter + 1",
        "loss_scaler_faces",
    ),
    "a dynamic scale starts above its bound": Mutant(
        "DynamicLossScaler.__init__",
        "min(value.scale, value.max_scale)",
        "value.scale",
        "loss_scaler_faces",
    ),
    "the count of good steps never starts again": Mutant(
        "DynamicLossScaler.loss_scale_value",
        "since_overflow % self.scale_window",
        "since_overflow",
        "loss_scaler_faces",
    ),
    "a pickled scaler of 2019 lacks later attributes": Mutant(
        "DynamicLossScaler.__setstate__",
        "DynamicLossScaler.__init__(self)",
        "",
        "loss_scaler_faces",
    ),
    "a flat master keeps a gradient that the model has not": Mutant(
        "model_grads_to_master_grads", "place.zero_()", "None", "fp16util"
    ),
    "a new loss scale leaves old gradients": Mutant(
        "MasterGrads.begin_backward",
        "_rescale(self.masters, scaled, before, scale)",
        "",
        "fp16_optimizer_accumulation",
    ),
    "gradients of masters are kept for the next backward": Mutant(
        "MasterGrads._release", "self.holding = False", "", "fp16_optimizer_accumulation"
    ),
    "float32 parameters of a mixed model are unscaled twice": Mutant(
        "MasterGrads.collect", "grads[index] = grad * here", "", "fp16_optimizer_legacy"
    ),
    "a scale survives zero_grad": Mutant(
        "MasterGrads.zero", "self._scale = None", "", "fp16_optimizer_accumulation"
    ),
    "gradients that a step has cleared come back": Mutant(
        "Exchange.leave",
        "param in self._grads and param.grad is None",
        "False",
        "master_weights_in_loops",
    ),
    "data that a step has put into a parameter is lost": Mutant(
        "Exchange.leave", "self._masters[param] = param.detach()", "", "master_weights_in_loops"
    ),
    "a step drops the hooks of a gradient's node": Mutant(
        "exchange._put",
        "_C.put_data(param, data)",
        "setattr(param, 'data', data)",
        "master_weights_in_loops",
    ),
    "MasterWeights overwrites what was written": Mutant(
        "MasterStore.whole",
        "joined(param, kept, out=kept)",
        "kept",
        "ways_gradients",
    ),
    "MasterWeights forgets a clip": Mutant(
        "Float32Grads.of",
        "factor / clip_divisor(step.clip_norm, step.clip_to)",
        "factor",
        "ways_gradients",
    ),
    "MasterWeights takes a step that is to be skipped": Mutant(
        "MasterWeights.__step_own",
        "step.result.outcome.found_inf",
        "False",
        "ways_skips",
    ),
    "MasterWeights steps some parameters in 16 bits": Mutant(
        "MasterWeights._masters_for_step",
        "param.requires_grad or param in grads",
        "param in grads",
        "master_weights_of_others",
    ),
    "MasterWeights steps frozen parameters that have a gradient in 16 bits": Mutant(
        "MasterWeights._masters_for_step",
        "param.requires_grad or param in grads",
        "param.requires_grad",
        "master_store",
    ),
    "methods beside step run in 16 bits": Mutant(
        "in_float32.call", "exchanged(masters, grads)", "exchanged({}, {})", "master_weights_doors"
    ),
    "a pickled optimizer has methods in 16 bits": Mutant(
        "MasterWeights._members", "in_float32(member)", "member", "master_weights_doors"
    ),
    "an optimizer around another one writes in 16 bits": Mutant(
        "_Giver.instead_of.step",
        "not _is_torchs(optimizer) and (not _passes_on(optimizer))",
        "False",
        "master_weights_of_scripts",
    ),
    "an optimizer around another one copies weights in 16 bits": Mutant(
        "_in_float32_of_another.initialize",
        "_low_params(each)",
        "()",
        "master_weights_of_scripts",
    ),
    "an average is one of weights": Mutant(
        "_Giver.around_average.update_parameters",
        "Values(model, masters)",
        "model",
        "master_weights_of_scripts",
    ),
    "a model that was in float32 for a while drops its masters": Mutant(
        "_put_original",
        "torch.where(is_weight, masters.whole_of(param), value)",
        "value",
        "master_weights_of_scripts",
    ),
    "each optimizer has a line of the report": Mutant(
        "_Giver.report", "owner == name", "owner is None", "master_weights_of_scripts"
    ),
    "a replaced parameter is kept alive by its master": Mutant(
        "Engine.step", "plan.has_others or self._has_new", "False", "master_store"
    ),
    "a parameter that comes back has lost its state": Mutant(
        "MasterStore.put_back", "state.setdefault(param, of_param)", "None", "master_store"
    ),
    "a master that was loaded before the first step is not saved": Mutant(
        "SavedOptimizer.state_dict",
        "master is None or (state is None and self._own_masters.is_weight(param))",
        "master is None or state is None",
        "master_store",
    ),
    "torch.distributed.checkpoint loads no masters": Mutant(
        "StateView.state", "store.beside", "dict", "distributed_checkpoint"
    ),
    "masters of a model that is cast later are rounded": Mutant(
        "_put_original",
        "torch.where(is_weight, masters.whole_of(param), value)",
        "masters.whole_of(param)",
        "run_master_weights",
    ),
    "an Adam in place decays weights": Mutant(
        "_adam.options_of",
        "group.get('decoupled_weight_decay', is_adamw)",
        "True",
        "run_fused",
    ),
    "an option that the fused step lacks is lost in place": Mutant(
        "_translated",
        "any((group.get(name) for group in found for name in kind.lacks))",
        "False",
        "run_fused_changes",
    ),
    "skipped steps of a fused optimizer in place are not counted": Mutant(
        "_Skips.after_step", "self.skipped += note.skipped", "", "run_master_weights"
    ),
    "state that moves to masters stays in float16": Mutant(
        "masters.widened",
        "tensors.cast_floating(value, torch.float32)",
        "value",
        "fp16_optimizer_masters",
    ),
    "masters do not lie in the flat vector": Mutant(
        "MasterGroup._flatten", "master.data = view", "", "fp16_optimizer_masters"
    ),
    "masters are in the order of their coming": Mutant(
        "MasterGroup.arrange",
        "[param for param in params if param in model_of]",
        "[*model_of]",
        "fp16_optimizer_checkpoints",
    ),
}

OPTIMIZERS = {
    "a step that raised leaves new state": Mutant(
        "Engine.step", "not plan.has_run", "False", "several_devices_refusals"
    ),
    "a Ctrl-C takes back the state of a step that was taken": Mutant(
        "Engine.step", "not plan.has_run", "True", "random_programs_today"
    ),
    "a skipped first step fills momentum": Mutant(
        "Engine.step", "outcome.found_inf", "False", "ways_skips"
    ),
    "torch.optim.Adam gets the other decay": Mutant(
        "FusedAdam._add_names_of_others",
        "group['adam_w_mode']",
        "not group['adam_w_mode']",
        "fused_rules",
    ),
    "an optimizer of torch that has hooks steps by a rule": Mutant(
        "Equivalent.groups_of", "_has_hooks(optimizer)", "False", "master_weights_of_scripts"
    ),
    "a file turns off the masters that were asked for": Mutant(
        "SavedOptimizer._adapted",
        "group.get('master_weights')",
        "group.get('master_weights') and saved_group.get('master_weights')",
        "written_weights",
    ),
    "a parameter in float32 keeps its master": Mutant(
        "MasterStore.keep_as", "self.kept.pop(param, None)", "", "written_weights"
    ),
    "a checkpoint has remainders": Mutant("MasterStore.saved", "compact", "True", "split_masters"),
    "a loaded checkpoint says how masters are kept": Mutant(
        "SavedOptimizer._adapted",
        "saved_group['master_weights'] = group['master_weights']",
        "",
        "split_masters",
    ),
    "a loaded hyperparameter may be out of range": Mutant(
        "adapt", "self._check_options({**self.defaults, **group})", "", "fused_rules_state"
    ),
    "a beta of 1 is allowed": Mutant(
        "check_betas", "0.0 <= beta < 1.0", "0.0 <= beta <= 1.0", "fused_rules_state"
    ),
    "a copy forgets unscale_grads": Mutant(
        "SavedOptimizer.__getstate__",
        "{name: getattr(self, name) for name in self._pickled}",
        "{}",
        "unscaled_grads",
    ),
    "FusedAdam does not get the decay of torch.optim.Adam": Mutant(
        "FusedAdam._adapt_group",
        "group['adam_w_mode'] = group.pop('decoupled_weight_decay')",
        "group.pop('decoupled_weight_decay')",
        "fused_rules",
    ),
    "the step count of a group is lost": Mutant(
        "SavedOptimizer._adapt_group",
        "{'step': step, **states[index]}",
        "{'step': 0, **states[index]}",
        "fused_rules_state",
    ),
    "moments of float64 parameters are loaded in float32": Mutant(
        "StateLayout.loaded",
        "torch.promote_types(param.dtype, torch.float32)",
        "torch.float32",
        "fused_rules_state",
    ),
    "a moment of another shape is loaded": Mutant(
        "_check_like",
        "value.shape != param.shape",
        "value.numel() != param.numel()",
        "fused_rules_state",
    ),
    "a step count that is a number is lost": Mutant(
        "_new_number",
        "float(value) if isinstance(value, (int, float)) else 0.0",
        "0.0",
        "fused_rules_state",
    ),
    "a flag of a fresh buffer stays though the host knows": Mutant(
        "_Rule.after_step",
        "states.get(param, {}).pop(IS_FRESH, None)",
        "",
        "fused_sgd_in_wrappers",
    ),
    "the first gradient is dampened": Mutant(
        "_Rule.note_new", "group['dampening']", "group['nesterov']", "fused_rules"
    ),
    "a checkpoint must have what is never saved": Mutant(
        "StateLayout.loaded",
        "(*self.numbers, *self.tensors)",
        "(*self.numbers, *self.unsaved_numbers, *self.tensors)",
        "fused_rules_state",
    ),
    "nesterov without momentum is let through": Mutant(
        "FusedSGD._check_new_options", "group['nesterov']", "False", "fused_rules_state"
    ),
    "FusedSGD forgets an option of its constructor in a pickle": Mutant(
        "FusedSGD",
        "('materialize_master_grads', 'set_grad_none', 'unscale_grads', 'offload')",
        "('unscale_grads', 'offload')",
        "fused_rules_state",
    ),
    "each piece of a parameter counts its steps": Mutant(
        "Item._cut_state",
        "[*value.detach().expand(count - 1, *value.shape).clone(), value]",
        "[value] * count",
        "offload",
    ),
    "small tensors that travel together are not gathered": Mutant(
        "Transfers.to_host", "gathered", "()", "offload"
    ),
    "random bits of a bucket are those of its first parameters": Mutant(
        "Bucket.__init__", "e.layout.number", "0", "offload"
    ),
    "a parameter whose random bits depend on elements is cut": Mutant(
        "HostSteps._layouts",
        "self._steps_parts and (not groups[group].get('stochastic_rounding'))",
        "self._steps_parts",
        "offload",
    ),
    "a gradient that was cleared counts": Mutant(
        "HostGrads.take", "held.is_zero = True", "pass", "offload_gradients"
    ),
    "accumulated gradients replace each other": Mutant(
        "HostGrads.send", "bus.add_on_host", "bus.to_host", "offload_gradients"
    ),
    "a gradient that was set to zero counts": Mutant(
        "_zero", "mark.held.is_zero = True", "pass", "offload_gradients"
    ),
    "gradients on their way to the host are kept": Mutant(
        "HostGrads._keep", "self._leaving_bytes <= self._limit", "True", "offload_gradients"
    ),
    "copies of an offloaded step are not waited for after an error": Mutant(
        "HostSteps._go_through", "bus.make_gpu_wait()", "pass", "offload_refusals"
    ),
    "gradients on several devices are clipped each by their own norm": Mutant(
        "DevicePlans.run",
        "found.of_all if clip_by_global_norm else found.of_groups[number]",
        "found.of_groups[number]",
        "several_devices",
    ),
    "gradients that are not scaled are left out of the norm": Mutant(
        "DevicePlans._measure",
        "torch.where(shards.mask(plain, len(norms), device), norms * factor, norms)",
        "norms.masked_fill(shards.mask(plain, len(norms), device), 0.0)",
        "several_devices",
    ),
    "the state of torch.optim.SGD without a buffer is refused": Mutant(
        "FusedSGD._adapt_state",
        "state.get(BUFFER) is not None or BUFFER not in state",
        "True",
        "fused_rules_state",
    ),
    "FusedAdagrad keeps the steps that torch counts": Mutant(
        "FusedAdagrad._adapt_group", "k != 'step'", "k", "fused_rules"
    ),
    "FusedAdagrad leaves out torch's decay of lr": Mutant(
        "FusedAdagrad._adapt_group",
        "('lr_decay', 'maximize')",
        "('maximize',)",
        "fused_rules_state",
    ),
    "FusedAdagrad always adds L2": Mutant(
        "FusedAdagrad.__init__",
        "{'lr': lr, 'eps': eps, 'weight_decay': weight_decay, 'adagrad_w_mode': "
        "adagrad_w_mode, 'max_grad_norm': max_grad_norm}",
        "{'lr': lr, 'eps': eps, 'weight_decay': weight_decay, 'adagrad_w_mode': "
        "False, 'max_grad_norm': max_grad_norm}",
        "fused_rules",
    ),
    "a negative eps is taken": Mutant(
        "check_group",
        "('momentum', 'eps', 'weight_decay', 'max_grad_norm')",
        "('momentum', 'weight_decay', 'max_grad_norm')",
        "fused_rules_state",
    ),
    "FusedNovoGrad gives norms of float16 parameters to those of float32": Mutant(
        "FusedNovoGrad._adapt_group",
        "(torch.float16, torch.float32)",
        "(torch.float32, torch.float16)",
        "fused_rules_state",
    ),
    "FusedNovoGrad takes norms of parameters without a state": Mutant(
        "FusedNovoGrad._adapt_group",
        "p.dtype == dtype and states.get(index)",
        "p.dtype == dtype",
        "fused_rules_state",
    ),
    "FusedNovoGrad takes any norm for the l2 norm": Mutant(
        "FusedNovoGrad._check_options", "(0, 2)", "(0, 1, 2)", "fused_rules_state"
    ),
    "FusedNovoGrad has its numbers in another order than its rule": Mutant(
        "FusedNovoGrad", "('step', 'exp_avg_sq')", "('exp_avg_sq', 'step')", "fused_rules"
    ),
    "FusedLAMB clips each group by its own norm": Mutant(
        "Engine._run", "self.rule.clips_by_global_norm", "False", "fused_rules"
    ),
    "norms of groups that are given count in FusedLAMB": Mutant(
        "Engine._norms",
        "None if self.rule.clips_by_global_norm else step.norms",
        "step.norms",
        "fused_rules",
    ),
    "FusedLAMB always decays the weights": Mutant(
        "FusedLAMB.__init__", "adam_w_mode", "True", "fused_rules"
    ),
    "FusedLAMB has no nvlamb": Mutant("FusedLAMB.__init__", "use_nvlamb", "False", "fused_rules"),
    "the norm of NovoGrad must have the shape of its parameter": Mutant(
        "_like_param",
        "_LIKE_PARAM if rule is None else (*rule.layout.tensors, 'master_param')",
        "_LIKE_PARAM",
        "ways_files",
    ),
}
