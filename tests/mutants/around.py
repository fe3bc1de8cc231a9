"""Wrong lines for checkpoints, the monitor, and what runs old scripts."""

from __future__ import annotations

from mutant import Mutant

CHECKPOINTS = {
    "a scaler without its attributes is let through": Mutant(
        "_load", "receivers.check_complete()", "", "load_checkpoint"
    ),
    "good steps of a pickled scaler are lost": Mutant(
        "_make_of_amp", "state.get('_unskipped', 0)", "0", "load_checkpoint"
    ),
    "the floor of a pickled scaler is lost": Mutant(
        "_make_of_amp",
        "state.get('_min_loss_scale') or FLOAT32_SMALLEST_NORMAL",
        "FLOAT32_SMALLEST_NORMAL",
        "load_checkpoint",
    ),
    "a pickled static scale becomes dynamic": Mutant(
        "_make_of_amp", "state.get('dynamic', True) is False", "False", "load_checkpoint"
    ),
    "masters keep old weights when a model is loaded": Mutant(
        "load", "master_of[id(tensor)].open().copy_(state[name])", "", "convert"
    ),
    "statistics of batch norms are rounded": Mutant(
        "to_mixed", "torch.float32", "tensor.dtype", "convert"
    ),
    "exported masters share memory with those in use": Mutant(
        "masters",
        "_widened(master_of.get(id(tensor), value).detach()).clone()",
        "_widened(master_of.get(id(tensor), value).detach())",
        "convert",
    ),
    "inf in a checkpoint counts as too large": Mutant(
        "check_value",
        "torch.isinf(value.to(tensor.dtype)) & ~torch.isinf(value)",
        "torch.isinf(value.to(tensor.dtype))",
        "convert",
    ),
    "versions of modules keep their old names": Mutant(
        "renamed", "_renamed_paths(versions, old, new)", "versions", "convert"
    ),
    "masters of a plain checkpoint are rounded": Mutant(
        "_followed",
        "torch.where(master.to(model.dtype) == model, master, model.float()).detach",
        "model.float",
        "fp16_optimizer_old_checkpoints",
    ),
    "groups that fit are put into the order of early 2018": Mutant(
        "_in_order",
        "not same_count or inner_state.fits(optimizer, inner['state'], saved, ours) "
        "or (not inner_state.fits(optimizer, inner['state'], saved, early))",
        "not same_count or not inner_state.fits(optimizer, inner['state'], saved, early)",
        "fp16_optimizer_checkpoints",
    ),
    "masters in a state_dict are those in use": Mutant(
        "masters", "master.detach().clone", "master.detach", "fp16_optimizer_checkpoints"
    ),
    "loaded masters are not written to the model": Mutant(
        "FP16_Optimizer.load_state_dict",
        "self._masters.copy_to_model()",
        "",
        "fp16_optimizer_checkpoints",
    ),
    "the number of steps is not loaded": Mutant(
        "FP16_Optimizer.load_state_dict",
        "self._iteration = loaded.iteration",
        "",
        "fp16_optimizer_checkpoints",
    ),
    "an inner optimizer keeps a state that it refused": Mutant(
        "load", "optimizer.state, optimizer.param_groups = before", "", "ways_files"
    ),
    "a refused state changes the first loss scales": Mutant(
        "load_scales", "scaler.value = value", "", "amp_checkpoints"
    ),
    "overflows since the scale changed are not loaded": Mutant(
        "LossScaler.load_state_dict", "state.get('overflows', 0)", "0", "amp_scaler"
    ),
    "saved masters go on with the run": Mutant(
        "CheckpointView.state_dict", "each.detach().clone", "each.detach", "distributed_checkpoint"
    ),
    "saving before the first step leaves a learning rate of zero": Mutant(
        "_with_state", "group['lr'] = rate", "", "distributed_checkpoint"
    ),
    "saving before the first step leaves state": Mutant(
        "_with_state", "optimizer.state.clear()", "", "distributed_checkpoint"
    ),
    "join of torch's own class leaves masters unequal": Mutant(
        "_join_hook",
        "FollowingJoinHook(self, _torchs_join_hook(self, **kwargs))",
        "_torchs_join_hook(self, **kwargs)",
        "parallel",
    ),
}

# What apex_mp.monitor keeps, and what it says of it.
MONITOR = {
    "a step that raises is waited for": Mutant(
        "announced", "listener.withdraw_step()", "", "monitor"
    ),
    "a norm outlives the step that it was measured for": Mutant(
        "stepping.clip",
        "iteration.noted = (norm, clip.divisor.reciprocal())",
        "step_log.measured(scaler, optimizer, grad_norm=norm)",
        "monitor",
    ),
    "a clip takes the largest factor of all groups": Mutant(
        "norm_and_clip", "min(factors, default=None)", "max(factors, default=None)", "monitor"
    ),
    "a listener hears other owners' steps": Mutant(
        "heard", "listeners.get(owner, ())", "sum(listeners.values(), [])", "monitor"
    ),
    "a skipped step counts as clipped": Mutant(
        "Monitor.after_step", "None if note.skipped else if_finite(clip)", "clip", "monitor"
    ),
    "results of a device are taken out of order": Mutant(
        "Monitor.after_step", "readback.wait()", "", "monitor"
    ),
    "skips are not counted in a row": Mutant(
        "History.add",
        "self.skips_in_a_row + 1 if step.skipped else 0",
        "self.skips_in_a_row + step.skipped",
        "monitor",
    ),
    "skips that go on are looked into each time": Mutant(
        "Monitor._judge", "streak.has_looked = True", "", "monitor_policies"
    ),
    "the batch of another step is run again": Mutant(
        "Monitor._judge", "self._runs.pop(step.number, self.run)", "self.run", "monitor_policies"
    ),
    "the smallest scale is never reached": Mutant(
        "Monitor._judge", "step.scale <= lowest", "step.scale < lowest", "monitor_policies"
    ),
    "a sum of gradients counts as the module's": Mutant(
        "look_before",
        "not found and any(map(holds_nonfinite, present_in(given)))",
        "False",
        "monitor_origin",
    ),
    "a mask is an origin": Mutant(
        "is_wrong",
        "holds_nonfinite(values) and (values.requires_grad or is_more_than_minus_inf(values))",
        "holds_nonfinite(values)",
        "monitor_origin",
    ),
    "code between modules counts as the next module's": Mutant(
        "_Search._before", "self._claim(given, caller, name)", "", "monitor_origin"
    ),
    "code after a module is named as before the next": Mutant(
        "_Search._after", "self._open[-1].called = call.module", "", "monitor_origin"
    ),
    "compiled layers are not looked into": Mutant(
        "find_nonfinite",
        "torch.compiler.set_stance('force_eager')",
        "torch.enable_grad()",
        "monitor_origin",
    ),
    "buffers stay as the second run left them": Mutant(
        "_all_restored",
        "for module, held in buffers:\n"
        "    module._buffers.clear()\n"
        "    module._buffers.update(held)",
        "for module, held in buffers:\n    pass",
        "monitor_origin",
    ),
    "gradients are cleared by the second run": Mutant(
        "_all_restored", "param.grad = grad", "", "monitor_origin"
    ),
    "random numbers go on from the second run": Mutant(
        "_all_restored",
        "torch.random.fork_rng(devices=sorted((device.index for device in gpus)))",
        "torch.random.fork_rng(enabled=False)",
        "monitor_origin",
    ),
    "unscaled gradients are counted as they lie": Mutant(
        "Sampler.sample", "shift if dtype in self._unscaled else 0", "0", "monitor_exponents"
    ),
    "a sample takes zeros for small numbers": Mutant(
        "Sampler.sample", "by_bin.pop(_ZEROS, 0)", "by_bin.get(_ZEROS, 0)", "monitor_exponents"
    ),
    "lost updates are counted in the dtype of the weights": Mutant(
        "_wide", "param.detach().double", "param.detach().clone", "monitor_exponents"
    ),
}

OLD_SCRIPTS = {
    "the era is that of the first name": Mutant(
        "era_of",
        "sum((era in each.eras for each in found))",
        "era in found[0].eras if found else 0",
        "check",
    ),
    "what a script imports is not read": Mutant("program", "waiting += sorted(new)", "", "check"),
    "torch.load is safe": Mutant("_in_call", "'weights_only' not in keywords", "False", "check"),
    "names that are not here pass": Mutant("_absence", "instead is None", "True", "check"),
    "a replacement cannot be compiled": Mutant(
        "Replacements.set", "self._compile_as(value, before)", "", "run_modernize"
    ),
    "a script is given an option that it does not declare": Mutant(
        "parse_known_args",
        "words[index] = word.replace('--local-rank', '--local_rank', 1)",
        "",
        "run_modernize",
    ),
    "float16 stays float16": Mutant(
        "_instead", "torch.bfloat16 if value is torch.float16 else value", "value", "run_cpu"
    ),
    "a Fourier transform is not normalized": Mutant(
        "_norm", "'ortho' if normalized else 'backward'", "'backward'", "run_modernize"
    ),
    "the optimizer of transformers corrects its bias": Mutant(
        "AdamW.__init__",
        "{'eps': eps, 'weight_decay': weight_decay, 'bias_correction': correct_bias}",
        "{'eps': eps, 'weight_decay': weight_decay, 'bias_correction': True}",
        "run_modernize",
    ),
    "uint8 masks in assignments stay": Mutant("set_item", "_as_bool(key)", "key", "run_modernize"),
    "a change of what x.data views is lost": Mutant(
        "in_data", "owner.data = data", "", "run_modernize"
    ),
    "what no script imports decides the status": Mutant(
        "examine",
        "_grouped((use for file, use in wrong if file in counted))",
        "_grouped((use for file, use in wrong))",
        "check_scripts",
    ),
    "a checkout of apex is read as the project's": Mutant(
        "_without_apex", "found.isdisjoint(file.parents)", "True", "check_scripts"
    ),
    "a skipped step of FusedMixedPrecisionLamb counts": Mutant(
        "FusedMixedPrecisionLamb._count",
        "group['step'].copy_(state['step'].view(-1))",
        "group['step'].add_(1)",
        "fused_rules_in_a_loop",
    ),
}
