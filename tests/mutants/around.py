"""Wrong lines for checkpoints, the monitor, and what runs old scripts."""

from __future__ import annotations

from mutant import Mutant

_LOADED_MASTERS = (
    "                master.copy_(saved)\n"
    "        self._masters.copy_to_model()\n        self._weights.begin()\n"
)
_LOADED = "                master.copy_(saved)\n        self._weights.begin()\n"

CHECKPOINTS = {
    "a scaler without its attributes is let through": Mutant(
        "checkpoint.py", "            receivers.check_complete()\n", "", "load_checkpoint"
    ),
    "good steps of a pickled scaler are lost": Mutant(
        "checkpointing/pickled_scalers.py",
        'good_steps=state.get("_unskipped", 0)',
        "good_steps=0",
        "load_checkpoint",
    ),
    "the floor of a pickled scaler is lost": Mutant(
        "checkpointing/pickled_scalers.py",
        'min_scale=state.get("_min_loss_scale") or FLOAT32_SMALLEST_NORMAL',
        "min_scale=FLOAT32_SMALLEST_NORMAL",
        "load_checkpoint",
    ),
    "a pickled static scale becomes dynamic": Mutant(
        "checkpointing/pickled_scalers.py",
        'if state.get("dynamic", True) is False:',
        "if False:",
        "load_checkpoint",
    ),
    "masters keep old weights when a model is loaded": Mutant(
        "convert.py", "master_of[id(tensor)].copy_(state[name])", "pass", "convert"
    ),
    "statistics of batch norms are rounded": Mutant(
        "convert.py",
        "name.endswith(_STATISTICS):\n            dtype = torch.float32",
        "name.endswith(_STATISTICS):\n            dtype = tensor.dtype",
        "convert",
    ),
    "exported masters share memory with those in use": Mutant(
        "convert.py",
        "_widened(master_of.get(id(tensor), value).detach()).clone()",
        "_widened(master_of.get(id(tensor), value).detach())",
        "convert",
    ),
    "inf in a checkpoint counts as too large": Mutant(
        "checkpointing/convert_checks.py", " & ~torch.isinf(value)", "", "convert"
    ),
    "versions of modules keep their old names": Mutant(
        "checkpointing/rename.py", "_renamed_paths(versions, old, new)", "versions", "convert"
    ),
    "masters of a plain checkpoint are rounded": Mutant(
        "fp16_utils/_checkpoint.py",
        "torch.where(master.to(model.dtype) == model, master, model.float()).detach()",
        "model.float()",
        "fp16_optimizer_old_checkpoints",
    ),
    "groups that fit are put into the order of early 2018": Mutant(
        "fp16_utils/_checkpoint.py",
        '            or _inner_state.fits(optimizer, inner["state"], saved, ours)\n',
        "",
        "fp16_optimizer_checkpoints",
    ),
    "masters in a state_dict are those in use": Mutant(
        "fp16_utils/_checkpoint.py",
        "[master.detach().clone() for master in group.master_params]",
        "[master.detach() for master in group.master_params]",
        "fp16_optimizer_checkpoints",
    ),
    "loaded masters are not written to the model": Mutant(
        "fp16_utils/_saving.py", _LOADED_MASTERS, _LOADED, "fp16_optimizer_checkpoints"
    ),
    "the number of steps is not loaded": Mutant(
        "fp16_utils/_saving.py",
        "        self._iteration = loaded.iteration\n",
        "",
        "fp16_optimizer_checkpoints",
    ),
    "an inner optimizer keeps a state that it refused": Mutant(
        "fp16_utils/_inner_state.py",
        "        optimizer.state, optimizer.param_groups = before\n",
        "",
        "fp16_optimizer_checkpoints",
    ),
    "a refused state changes the first loss scales": Mutant(
        "amp/_checkpoint.py", "scaler.value = value", "pass", "amp_checkpoints"
    ),
    "overflows since the scale changed are not loaded": Mutant(
        "amp/scaler.py", 'overflows=state.get("overflows", 0)', "overflows=0", "amp_scaler"
    ),
    "saved masters go on with the run": Mutant(
        "core/checkpoint_view.py",
        "{name: each.detach().clone() for name, each in self._master(param).items()}",
        "{name: each.detach() for name, each in self._master(param).items()}",
        "distributed_checkpoint",
    ),
    "saving before the first step leaves a learning rate of zero": Mutant(
        "core/checkpoint_view.py", 'group["lr"] = rate\n', "pass\n", "distributed_checkpoint"
    ),
    "saving before the first step leaves state": Mutant(
        "core/checkpoint_view.py", "optimizer.state.clear()", "pass", "distributed_checkpoint"
    ),
    "join of torch's own class leaves masters unequal": Mutant(
        "core/parallel_masters.py",
        "return FollowingJoinHook(self, _torchs_join_hook(self, **kwargs))",
        "return _torchs_join_hook(self, **kwargs)",
        "parallel",
    ),
}

# What apex_mp.monitor keeps, and what it says of it.
MONITOR = {
    "a step that raises is waited for": Mutant(
        "core/step_log.py",
        "            listener.withdraw_step()\n",
        "            pass\n",
        "monitor",
    ),
    "a norm outlives the step that it was measured for": Mutant(
        "amp/_unscaling.py",
        "            state[NOTED] = norm, clip.divisor.reciprocal()\n",
        "            step_log.measured(self, optimizer, grad_norm=norm)\n",
        "monitor",
    ),
    "a clip takes the largest factor of all groups": Mutant(
        "core/step_log.py",
        "return total, min(factors, default=None)",
        "return total, max(factors, default=None)",
        "monitor",
    ),
    "a listener hears other owners' steps": Mutant(
        "core/step_log.py",
        "for each in listeners.get(owner, ())]",
        "for each in sum(listeners.values(), [])]",
        "monitor",
    ),
    "a skipped step counts as clipped": Mutant(
        "monitor/_monitor.py",
        "clip=None if note.skipped else if_finite(clip),",
        "clip=clip,",
        "monitor",
    ),
    "results of a device are taken out of order": Mutant(
        "monitor/_monitor.py",
        "readback.wait()  # The outcome of this",
        "#",
        "monitor",
    ),
    "skips are not counted in a row": Mutant(
        "monitor/history.py",
        "self.skips_in_a_row + 1 if step.skipped else 0",
        "self.skips_in_a_row + step.skipped",
        "monitor",
    ),
    "skips that go on are looked into each time": Mutant(
        "monitor/_monitor.py", "            streak.has_looked = True\n", "", "monitor_policies"
    ),
    "the batch of another step is run again": Mutant(
        "monitor/_monitor.py",
        "self._runs.pop(step.number, self.run)",
        "self.run",
        "monitor_policies",
    ),
    "the smallest scale is never reached": Mutant(
        "monitor/_monitor.py", "step.scale <= lowest", "step.scale < lowest", "monitor_policies"
    ),
    "a sum of gradients counts as the module's": Mutant(
        "monitor/origin.py",
        "if not found and any(map(holds_nonfinite, present_in(given))):",
        "if False:",
        "monitor_origin",
    ),
    "a mask is an origin": Mutant(
        "monitor/_ranges.py",
        "and (values.requires_grad or is_more_than_minus_inf(values))",
        "",
        "monitor_origin",
    ),
    "code between modules counts as the next module's": Mutant(
        "monitor/origin.py", "        self._claim(given, caller)\n", "", "monitor_origin"
    ),
    "compiled layers are not looked into": Mutant(
        "monitor/origin.py",
        ', torch.compiler.set_stance("force_eager"):',
        ":",
        "monitor_origin",
    ),
    "buffers stay as the second run left them": Mutant(
        "monitor/origin.py",
        "                module._buffers.clear()\n                module._buffers.update(held)\n",
        "                pass\n",
        "monitor_origin",
    ),
    "gradients are cleared by the second run": Mutant(
        "monitor/origin.py",
        "                param.grad = grad\n",
        "                pass\n",
        "monitor_origin",
    ),
    "random numbers go on from the second run": Mutant(
        "monitor/origin.py",
        "with torch.random.fork_rng(devices=sorted(device.index for device in gpus)):",
        "with torch.random.fork_rng(enabled=False):",
        "monitor_origin",
    ),
    "unscaled gradients are counted as they lie": Mutant(
        "monitor/exponents.py",
        "moved = shift if dtype in self._unscaled else 0",
        "moved = 0",
        "monitor_exponents",
    ),
    "a sample takes zeros for small numbers": Mutant(
        "monitor/exponents.py",
        "by_bin.pop(_ZEROS, 0), by_bin",
        "by_bin.get(_ZEROS, 0), by_bin",
        "monitor_exponents",
    ),
    "lost updates are counted in the dtype of the weights": Mutant(
        "monitor/updates.py",
        "param.detach().double(), requires",
        "param.detach().clone(), requires",
        "monitor_exponents",
    ),
}

OLD_SCRIPTS = {
    "the era is that of the first name": Mutant(
        "_as_apex/evidence.py",
        "sum(era in each.eras for each in found)",
        "era in found[0].eras if found else 0",
        "check",
    ),
    "what a script imports is not read": Mutant(
        "_as_apex/sources.py", "waiting += sorted(new)", "pass", "check"
    ),
    "torch.load is safe": Mutant(
        "_check/needs.py", '"weights_only" not in keywords', "False", "check"
    ),
    "names that are not here pass": Mutant(
        "_check/needs.py",
        "return None if instead is None else",
        "return None if True else",
        "check",
    ),
    "a replacement cannot be compiled": Mutant(
        "_run/replacements.py",
        "            self._compile_as(value, before)",
        "            pass",
        "run_modernize",
    ),
    "a script is given an option that it does not declare": Mutant(
        "_run/launched.py",
        'words[index] = word.replace("--local-rank", "--local_rank", 1)',
        "pass",
        "run_modernize",
    ),
    "float16 stays float16": Mutant(
        "_run/bfloat16.py",
        "torch.bfloat16 if value is torch.float16 else value",
        "value",
        "run_cpu",
    ),
    "a Fourier transform is not normalized": Mutant(
        "_run/modernize/names.py",
        'return "ortho" if normalized else "backward"',
        'return "backward"',
        "run_modernize",
    ),
    "the optimizer of transformers corrects its bias": Mutant(
        "_run/modernize/packages.py",
        '"bias_correction": correct_bias',
        '"bias_correction": True',
        "run_modernize",
    ),
    "uint8 masks in assignments stay": Mutant(
        "_run/modernize/masks.py",
        'original(self, _as_bool("x[mask] = value", index), value)',
        "original(self, index, value)",
        "run_modernize",
    ),
}
