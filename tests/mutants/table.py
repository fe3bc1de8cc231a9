"""Wrong lines for apex_mp/, each with the test file that has to fail with it."""

from __future__ import annotations

from drawn import DRAWN
from mutant import Mutant

_EARLIER = "for scaler in self.earlier:\n            scaler.note_overflow("
_UNSCALED = "for guard in guards:\n            guard.scaled_by = "
_UPDATE = "self.value = self.value.update(should_skip)\n        self._has_overflow = "
_LOADED_MASTERS = (
    "                master.copy_(saved)\n"
    "        self._masters.copy_to_model()\n        self._weights.begin()\n"
)
_LOADED = "                master.copy_(saved)\n        self._weights.begin()\n"
_FLAT_ZERO = "place.zero_() if param.grad is None else place.copy_"
_FLAT_OLD = "None if param.grad is None else place.copy_"
_UNDONE = "except BaseException:\n            self._take_back(before)\n"
_NOT_UNDONE = "except BaseException:\n"

AMP = {
    "an overflow does not reach earlier losses": Mutant(
        "amp/scaling.py", f"{_EARLIER}overflowed)", f"{_EARLIER}False)", "amp_scale_loss_steps"
    ),
    "a loss of two blocks updates its scale twice": Mutant(
        "amp/scaling.py", "earlier.pop(id(scaler), None)", "pass", "amp_scale_loss_steps"
    ),
    "unscaled gradients count as scaled": Mutant(
        "amp/scaling.py",
        f"{_UNSCALED}None",
        f"{_UNSCALED}guard.scaled_by",
        "amp_scale_loss_steps",
    ),
    "a float16 loss is scaled in float16": Mutant(
        "amp/scaling.py",
        "return loss if loss.dtype is torch.float64 else loss.float()",
        "return loss",
        "amp_scale_loss",
    ),
    "two blocks of one optimizer may be open": Mutant(
        "amp/scaling.py",
        "for guard in guards:\n        guard.in_block = True",
        "for guard in guards:\n        guard.in_block = False",
        "amp_scale_loss",
    ),
    "gradients of masters that zero_grad set to zero are dropped": Mutant(
        "amp/_masters.py",
        "self._grads = _Grads.CLEARED",
        "pass",
        "amp_opt_levels",
    ),
    "masters keep their gradients after a skipped step": Mutant(
        "amp/step_guard.py", "slots.params[row].grad = None", "pass", "amp_opt_levels"
    ),
    "a step takes scaled gradients": Mutant(
        "amp/step_guard.py",
        "        self._refuse_scaled_gradients(optimizer)\n",
        "",
        "amp_scale_loss_steps",
    ),
    "an abandoned line search is kept": Mutant(
        "amp/step_guard.py",
        "before.restore(state)\n            value = None",
        "value = None",
        "amp_scale_loss_steps",
    ),
    "the guard of an optimizer guards its copies": Mutant(
        "amp/step_guard.py",
        'if vars(optimizer).get("_amp_step_guard") is not self:',
        "if False:",
        "amp_scale_loss",
    ),
    "frozen parameters get masters": Mutant(
        "core/masters.py",
        "if param.dtype in LOW_PRECISION and param.requires_grad:",
        "if param.dtype in LOW_PRECISION:",
        "amp_opt_levels",
    ),
    "masters begin with rounded values": Mutant(
        "amp/_masters.py",
        "originals.get(param, param).data.float()",
        "param.data.float()",
        "amp_opt_levels",
    ),
    "state stays with the model's parameters": Mutant(
        "core/masters.py",
        "            if param in state:\n",
        "            if False:\n",
        "amp_opt_levels",
    ),
    "gradients of a step count again": Mutant(
        "amp/_masters.py",
        "self._grads = _Grads.USED",
        "pass",
        "amp_opt_levels",
    ),
    "a closure computes with old weights": Mutant(
        "amp/_masters.py",
        "            self.copy_to_model()\n            return closure()",
        "            return closure()",
        "amp_opt_levels",
    ),
    "a model saves rounded weights": Mutant(
        "amp/_master_state.py",
        "tensor.float() if master is None else master.detach()",
        "tensor.float()",
        "amp_opt_levels",
    ),
    "a cast of another dtype is taken": Mutant(
        "amp/casting.py",
        "if done is None or done.dtype is not dtype:",
        "if done is None:",
        "amp_cast_cache",
    ),
    "a cast outlives an edit of its weight": Mutant(
        "amp/casting.py",
        'return done if getattr(done, "_source", None) == source else None',
        "return done",
        "amp_weight_edits",
    ),
    "a float32 result is computed in low precision": Mutant(
        "amp/casting.py",
        "isinstance(out, Tensor) and out.dtype is torch.float32",
        "False",
        "amp_casts",
    ),
    "in-place operators cast the other way": Mutant(
        "amp/casting.py",
        "source = torch.float32 if target is low else low",
        "source = low if target is low else torch.float32",
        "amp_policy",
    ),
    "casts end with the first function that is not cast inside": Mutant(
        "amp/casting.py",
        "        finally:\n            torch.set_autocast_enabled(device_type, True)",
        "        finally:\n            pass",
        "amp_casts",
    ),
    "a cast made in inference mode is kept": Mutant(
        "amp/casting.py", "or torch.is_inference_mode_enabled()", "or False", "amp_cast_cache"
    ),
    "a namedtuple becomes a tuple": Mutant(
        "core/tensors.py", "return value._make(items)", "return tuple(items)", "amp_casts"
    ),
    "the inner of two disable_casts switches casts on": Mutant(
        "amp/switch.py", "thread.off -= 1", "thread.off = 0", "amp_threads"
    ),
    "patches are put back in the order of their coming": Mutant(
        "amp/patching.py",
        "[*self._patches.values()][::-1]",
        "[*self._patches.values()]",
        "amp_patching",
    ),
    "a loss scale starts above its bound": Mutant(
        "amp/scaler.py",
        "dataclasses.replace(value, scale=min(value.scale, value.max_scale))",
        "value",
        "amp_scaler",
    ),
    "an overflow counts for every later step": Mutant(
        "amp/scaler.py", f"{_UPDATE}False", f"{_UPDATE}should_skip", "amp_scaler"
    ),
    "gradients are added up in another order of memory": Mutant(
        "amp/_loss_grads.py", "_grads.match_strides(grad, part)", "grad", "amp_scale_loss"
    ),
    "a block that raised loses the gradients before it": Mutant(
        "amp/_loss_grads.py",
        "source.grad = stashed.source_grad\n",
        "source.grad = None\n",
        "amp_scale_loss_steps",
    ),
    "gradients left scaled are scaled once more": Mutant(
        "amp/_loss_grads.py",
        "mul_(scale / (scaled_by or 1.0))",
        "mul_(scale)",
        "amp_scale_loss_steps",
    ),
    "an optimizer skips for what another one's gradients hold": Mutant(
        "amp/scaling.py", "if overflowed or found_in_sum:", "if True:", "amp_scale_loss"
    ),
    "unscaling into float16 may overflow unseen": Mutant(
        "amp/_loss_grads.py",
        "for grad in grads if grad.dtype is",
        "for grad in () if grad.dtype is",
        "amp_scale_loss",
    ),
}

FP16_UTILS = {
    "a legacy step is told of no loss scale": Mutant(
        "fp16_utils/_stepping.py",
        '"scale": float(scale),',
        '"scale": 1.0,',
        "fp16_optimizer_in_torch",
    ),
    "a backward that raised leaves scaled gradients": Mutant(
        "fp16_utils/fp16_optimizer.py",
        "            self._grads.abandon_backward()\n",
        "",
        "fp16_optimizer_accumulation",
    ),
    "clipping after a step is undone": Mutant(
        "fp16_utils/fp16_optimizer.py",
        "        self._grads.accept_edits()\n        return norm",
        "        return norm",
        "fp16_optimizer_accumulation",
    ),
    "inf that an edit brings in is not seen": Mutant(
        "fp16_utils/_stepping.py",
        "self._overflow = None  # An edit, by",
        "pass  # An edit, by",
        "fp16_optimizer_overflow",
    ),
    "a global norm is each group's own": Mutant(
        "fp16_utils/_stepping.py",
        "norms = [math.hypot(*norms)] * len(norms)",
        "pass",
        "fp16_optimizer_clipping",
    ),
    "masters without a gradient are not written": Mutant(
        "fp16_utils/_stepping.py",
        "write([(model, master) for model, master in places if model is not None])",
        "pass",
        "fp16_optimizer_masters",
    ),
    "a line search sees old weights": Mutant(
        "fp16_utils/_stepping.py",
        "self._masters.copy_to_model()  # A line search has moved the masters.",
        "pass",
        "fp16_optimizer_closures",
    ),
    "FP16_Optimizer keeps an abandoned line search": Mutant(
        "fp16_utils/_stepping.py",
        "            before.restore(self.state)\n",
        "",
        "fp16_optimizer_closures",
    ),
    "skips are counted over good steps": Mutant(
        "core/step_log.py",
        "self.skips_in_a_row + 1 if skipped else 0",
        "self.skips_in_a_row + skipped",
        "fp16_optimizer_overflow",
    ),
    "a skipped step is no step for schedulers": Mutant(
        "core/step_log.py",
        "            _mark_step_called(self._optimizer())\n",
        "",
        "fp16_optimizer_in_torch",
    ),
    "the first overflow is dated one step late": Mutant(
        "fp16_utils/loss_scaler.py",
        "self.last_overflow_iter = self.cur_iter",
        "self.last_overflow_iter = self.cur_iter + 1",
        "loss_scaler_faces",
    ),
    "a dynamic scale starts above its bound": Mutant(
        "fp16_utils/loss_scaler.py",
        "self.cur_scale = min(value.scale, value.max_scale)",
        "self.cur_scale = value.scale",
        "loss_scaler_faces",
    ),
    "the count of good steps never starts again": Mutant(
        "fp16_utils/loss_scaler.py",
        "good_steps=since_overflow % self.scale_window",
        "good_steps=since_overflow",
        "loss_scaler_faces",
    ),
    "a pickled scaler of 2019 lacks later attributes": Mutant(
        "fp16_utils/loss_scaler.py",
        "        DynamicLossScaler.__init__(self)\n",
        "",
        "loss_scaler_faces",
    ),
    "a flat master keeps a gradient that the model has not": Mutant(
        "fp16_utils/fp16util.py", _FLAT_ZERO, _FLAT_OLD, "fp16util"
    ),
    "a new loss scale leaves old gradients": Mutant(
        "core/master_grads.py",
        "        _rescale(self.masters, scaled, before, scale)\n",
        "",
        "fp16_optimizer_accumulation",
    ),
    "gradients of masters are kept for the next backward": Mutant(
        "core/master_grads.py",
        "        self.holding = False\n        for master in self.masters.model_of:\n",
        "        for master in self.masters.model_of:\n",
        "fp16_optimizer_accumulation",
    ),
    "float32 parameters of a mixed model are unscaled twice": Mutant(
        "core/master_grads.py", "grads[index] = grad * here", "pass", "fp16_optimizer_legacy"
    ),
    "a scale survives zero_grad": Mutant(
        "core/master_grads.py",
        "        self._scale = None\n        if not (to_none",
        "        if not (to_none",
        "fp16_optimizer_accumulation",
    ),
    "state that moves to masters stays in float16": Mutant(
        "core/masters.py", "return value.float() if ", "return value if ", "fp16_optimizer_masters"
    ),
    "masters do not lie in the flat vector": Mutant(
        "core/masters.py", "            master.data = view\n", "", "fp16_optimizer_masters"
    ),
    "masters are in the order of their coming": Mutant(
        "core/masters.py",
        "self.master_params = [param for param in params if param in model_of]",
        "self.master_params = [*model_of]",
        "fp16_optimizer_checkpoints",
    ),
}

OPTIMIZERS = {
    "a step that raised leaves new state": Mutant(
        "optimizers/_fused.py", _UNDONE, _NOT_UNDONE, "several_devices_refusals"
    ),
    "a skipped first step leaves new state": Mutant(
        "optimizers/_fused.py",
        "if outcome.found_inf:\n            self._take_back(before)",
        "if False:\n            self._take_back(before)",
        "fp16_optimizer_overflow",
    ),
    "torch.optim.Adam is told the other decay": Mutant(
        "optimizers/fused_adam.py",
        'group["decoupled_weight_decay"] = group["adam_w_mode"]',
        'group["decoupled_weight_decay"] = not group["adam_w_mode"]',
        "fused_adam_state",
    ),
    "a remainder outlives what was written to its weight": Mutant(
        "optimizers/_fused.py",
        "tensors.local_part(state[MASTER]).zero_()",
        "tensors.local_part(state[MASTER])",
        "split_masters",
    ),
    "a checkpoint has remainders": Mutant(
        "optimizers/_saved.py",
        "if not compact and _state.is_split(state):",
        "if compact and _state.is_split(state):",
        "split_masters",
    ),
    "a loaded checkpoint says how masters are kept": Mutant(
        "optimizers/_saved.py",
        'saved_group["master_weights"] = group["master_weights"]',
        "pass",
        "split_masters",
    ),
    "a loaded hyperparameter may be out of range": Mutant(
        "optimizers/_saved.py",
        "self._check_options({**self.defaults, **group})\n            return adapted",
        "pass\n            return adapted",
        "fused_adam_state",
    ),
    "a beta of 1 is allowed": Mutant(
        "core/options.py", "0.0 <= beta < 1.0", "0.0 <= beta <= 1.0", "fused_adam_errors"
    ),
    "a copy forgets unscale_grads": Mutant(
        "optimizers/_saved.py",
        "{name: getattr(self, name) for name in self._pickled}",
        "{}",
        "unscaled_grads",
    ),
    "FusedAdam is not told the decay of torch.optim.Adam": Mutant(
        "optimizers/fused_adam.py",
        'group["adam_w_mode"] = group.pop("decoupled_weight_decay")',
        'group.pop("decoupled_weight_decay")',
        "fused_adam_state",
    ),
    "the step count of a group is lost": Mutant(
        "optimizers/_saved.py",
        '{"step": step, **states[index]}',
        '{"step": 0, **states[index]}',
        "fused_adam_state",
    ),
    "moments of float64 parameters are loaded in float32": Mutant(
        "optimizers/_state.py",
        "wide = param.dtype == torch.float64 and name in self.tensors",
        "wide = False",
        "fused_adam_state",
    ),
    "a moment of another shape is loaded": Mutant(
        "optimizers/_state.py",
        "if value.shape != param.shape:",
        "if value.numel() != param.numel():",
        "fused_adam_state",
    ),
    "a step count that is a number is lost": Mutant(
        "optimizers/_state.py",
        "float(value) if isinstance(value, (int, float)) else 0.0",
        "0.0",
        "fused_adam_state",
    ),
    "a flag of a fresh buffer stays though the host knows": Mutant(
        "optimizers/fused_sgd.py",
        "self.state.get(param, {}).pop(IS_FRESH, None)",
        "pass",
        "fused_sgd_in_wrappers",
    ),
    "the first gradient is dampened": Mutant(
        "optimizers/fused_sgd.py",
        'if group["dampening"] and not',
        'if group["nesterov"] and not',
        "fused_sgd",
    ),
    "a checkpoint must have what is never saved": Mutant(
        "optimizers/_state.py",
        "names = (*self.numbers, *self.tensors)",
        "names = (*self.numbers, *self.unsaved_numbers, *self.tensors)",
        "fused_sgd_state",
    ),
    "nesterov without momentum is let through": Mutant(
        "optimizers/fused_sgd.py",
        'if group["nesterov"] and not (',
        "if False and not (",
        "fused_sgd",
    ),
    "FusedSGD forgets an option of its constructor in a pickle": Mutant(
        "optimizers/fused_sgd.py",
        '_pickled = ("materialize_master_grads", "set_grad_none", "unscale_grads")',
        '_pickled = ("unscale_grads",)',
        "fused_sgd_state",
    ),
    "gradients on several devices are clipped each by their own norm": Mutant(
        "optimizers/_several_devices.py",
        "measured.of_all if clip_by_global_norm else measured.of_groups[number]",
        "measured.of_groups[number]",
        "several_devices",
    ),
    "gradients that are not scaled are left out of the norm": Mutant(
        "optimizers/_several_devices.py",
        "of_groups = torch.hypot(scaled, plain * _number_on(scalar_device, scale))",
        "of_groups = scaled",
        "several_devices",
    ),
    "the state of torch.optim.SGD without a buffer is refused": Mutant(
        "optimizers/fused_sgd.py",
        "if state.get(BUFFER) is not None or not {BUFFER, MASTER} & state.keys():",
        "if True:",
        "fused_sgd_state",
    ),
    "FusedAdagrad keeps the steps that torch counts": Mutant(
        "optimizers/fused_adagrad.py", 'if k != "step"', "if k", "fused_adagrad"
    ),
    "FusedAdagrad leaves out torch's decay of lr": Mutant(
        "optimizers/fused_adagrad.py", '("lr_decay", "maximize")', '("maximize",)', "fused_adagrad"
    ),
    "FusedAdagrad always adds L2": Mutant(
        "optimizers/fused_adagrad.py",
        '"adagrad_w_mode": adagrad_w_mode',
        '"adagrad_w_mode": False',
        "fused_adagrad",
    ),
    "a negative eps is taken": Mutant(
        "core/options.py",
        '("momentum", "eps", "weight_decay", "max_grad_norm")',
        '("momentum", "weight_decay", "max_grad_norm")',
        "fused_rules",
    ),
    "FusedNovoGrad gives norms of float16 parameters to those of float32": Mutant(
        "optimizers/fused_novograd.py",
        "zip((torch.float16, torch.float32), norms",
        "zip((torch.float32, torch.float16), norms",
        "fused_novograd",
    ),
    "FusedNovoGrad takes norms of parameters without a state": Mutant(
        "optimizers/fused_novograd.py",
        "if p.dtype == dtype and states.get(index)",
        "if p.dtype == dtype",
        "fused_novograd",
    ),
    "FusedNovoGrad takes any norm for the l2 norm": Mutant(
        "optimizers/fused_novograd.py", "not in (0, 2)", "not in (0, 1, 2)", "fused_novograd"
    ),
    "FusedNovoGrad has its numbers in another order than its rule": Mutant(
        "optimizers/fused_novograd.py",
        'numbers=("step", "exp_avg_sq")',
        'numbers=("exp_avg_sq", "step")',
        "fused_rules",
    ),
    "FusedLAMB clips each group by its own norm": Mutant(
        "optimizers/fused_lamb.py",
        "_clips_by_global_norm = True",
        "_clips_by_global_norm = False",
        "fused_lamb",
    ),
    "norms of groups that are given count in FusedLAMB": Mutant(
        "optimizers/_fused.py",
        "None if self._clips_by_global_norm else request.norms",
        "request.norms",
        "fused_lamb",
    ),
    "FusedLAMB always decays the weights": Mutant(
        "optimizers/fused_lamb.py",
        '"adam_w_mode": adam_w_mode',
        '"adam_w_mode": True',
        "fused_rules",
    ),
    "FusedLAMB has no nvlamb": Mutant(
        "optimizers/fused_lamb.py",
        '"use_nvlamb": use_nvlamb',
        '"use_nvlamb": False',
        "fused_lamb",
    ),
    "the norm of NovoGrad must have the shape of its parameter": Mutant(
        "fp16_utils/_inner_state.py",
        'return _LIKE_PARAM if layout is None else (*layout.tensors, "master_param")',
        "return _LIKE_PARAM",
        "fused_rules",
    ),
}

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
    "groups that fit are brought into the order of early 2018": Mutant(
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

SCALER = {
    "a clip is forgotten by the step": Mutant(
        "amp/grad_scaler.py",
        'optimizer.grad_scale = clip * getattr(optimizer, "grad_scale", 1)',
        "pass",
        "grad_scaler_clip",
    ),
    "a clip is forgotten by unscale_": Mutant(
        "amp/_unscaling.py", "inv_scale = inv_scale / clip", "pass", "grad_scaler_clip"
    ),
    "a clip makes small gradients larger": Mutant(
        "amp/_folded_clip.py",
        "torch.clamp((norm + 1e-6) / max_norm, min=1.0)",
        "((norm + 1e-6) / max_norm)",
        "grad_scaler_clip",
    ),
    "the norm is that of scaled gradients": Mutant(
        "amp/_unscaling.py",
        ".norm(scale.device) / scale\n",
        ".norm(scale.device)\n",
        "grad_scaler_clip",
    ),
    "an infinite norm makes gradients NaN before they are counted": Mutant(
        "amp/_folded_clip.py",
        "torch.where(norm.isfinite(), divisor, 1.0)",
        "divisor",
        "grad_scaler_skips",
    ),
    "what clipping has found is looked for again": Mutant(
        "amp/_unscaling.py",
        "if _CLIPPED not in state:\n            grads",
        "if True:\n            grads",
        "grad_scaler_clip",
    ),
    "gradients after a clip are taken for those that were measured": Mutant(
        "amp/_folded_clip.py",
        "if self._versions.changed(params_of(optimizer)):",
        "if False:",
        "grad_scaler_clip",
    ),
    "a plain step takes gradients that clipping left scaled": Mutant(
        "amp/_folded_clip.py",
        "optimizer.register_step_pre_hook(self._refuse_plain_step)",
        "optimizer.register_step_pre_hook(lambda *_: None)",
        "grad_scaler_order",
    ),
    "a clip is lost by an update before the step": Mutant(
        "amp/_folded_clip.py", "if self.is_late:", "if False:", "grad_scaler_order"
    ),
    "an iteration that was given up is remembered": Mutant(
        "amp/_unscaling.py", "if clip.is_obsolete(optimizer):", "if False:", "grad_scaler_order"
    ),
    "a loss that was not scaled is no mistake after the first": Mutant(
        "amp/grad_scaler.py", "self._losses.forget()", "pass", "grad_scaler_order"
    ),
    "a float16 loss is told of at any scale": Mutant(
        "amp/_scaled_losses.py", "if scale > _LARGEST:", "if True:", "grad_scaler_order"
    ),
    "some gradients of 0 are taken for all": Mutant(
        "amp/_scaled_steps.py", "not any(sum_sq)", "not all(sum_sq)", "grad_scaler_order"
    ),
    "a learning rate of 0 counts as lost updates": Mutant(
        "amp/_scaled_steps.py",
        "return isinstance(lr, (int, float)) and lr == 0.0",
        "return False",
        "grad_scaler_skips",
    ),
    "after a warm-up nobody looks for lost updates": Mutant(
        "amp/_scaled_steps.py",
        "not named and len(moving) == len(optimizer.param_groups)",
        "not named",
        "grad_scaler_skips",
    ),
    "a step before the first loss is taken note of": Mutant(
        "amp/grad_scaler.py",
        'self._check_scale_growth_tracker("step")',
        "pass",
        "grad_scaler_misuse",
    ),
    "a refused step leaves its scale with the optimizer": Mutant(
        "amp/grad_scaler.py", "delattr(optimizer, name)", "pass", "grad_scaler_misuse"
    ),
    "a closure by place is called": Mutant(
        "amp/grad_scaler.py", "if args and callable(args[0]):", "if False:", "grad_scaler_misuse"
    ),
    "bounds are not loaded": Mutant(
        "amp/_scale_bounds.py",
        "self._bounds = self._bounds.loaded(state_dict)",
        "pass",
        "grad_scaler_bounds",
    ),
    "a checkpoint has bounds that were not given": Mutant(
        "amp/_scale_bounds.py",
        "if state and self._bounds else state",
        "if state else state",
        "grad_scaler_bounds",
    ),
    "states of optimizers outlive a bounded update": Mutant(
        "amp/_scale_bounds.py",
        "self._per_optimizer_states.clear()",
        "pass",
        "grad_scaler_bounds",
    ),
    "a shared gradient is unscaled twice": Mutant(
        "amp/_scaled_grads.py",
        "{id(grad): grad for grad in on_device}",
        "{number: grad for number, grad in enumerate(on_device)}",
        "grad_scaler",
    ),
    "saving a new run counts as a step": Mutant(
        "optimizers/_fused.py", 'state["step"].zero_()', "pass", "distributed_checkpoint"
    ),
    "what is not divided counts once for each process": Mutant(
        "core/shards.py", "1.0 if divided else 1.0 / size", "1.0", "shards"
    ),
    "each process clips by the norm of its own parts": Mutant(
        "optimizers/_fused.py", "or not plan.has_parts:", "or plan.has_parts:", "shards"
    ),
    "processes with other loss scales train together": Mutant(
        "core/shards.py", "if their_scale != scale:", "if False:", "shards"
    ),
    "processes are compared at each step": Mutant(
        "core/shards.py", "_COMPARED[first] = True", "pass", "shards"
    ),
    "inf in one process is unknown to the others": Mutant(
        "core/shards.py", "(flag != 0.0).float()", "flag.float() * 0.0", "shards"
    ),
    "what is found later hides what was found before": Mutant(
        "core/found_inf.py", "torch.maximum(flag, found)", "found", "grad_slots"
    ),
    "overflows on two devices add up to no overflow of torch": Mutant(
        "core/found_inf.py", "other.zero_()", "pass", "grad_slots"
    ),
    "the outcome is a tensor that update writes": Mutant(
        "amp/_scaled_steps.py",
        "found = torch.stack(flags).sum()",
        "found = found_inf[scalar_device]",
        "grad_scaler_skips",
    ),
    "names of a step are those of gradients that came since": Mutant(
        "amp/_scaled_steps.py",
        " and not self._versions.changed(self._params())",
        "",
        "grad_scaler_skips",
    ),
    "a skipped step counts as one that moved nothing": Mutant(
        "amp/_scaled_steps.py",
        "if found_inf or self._has_looked_at_updates:",
        "if self._has_looked_at_updates:",
        "grad_scaler_skips",
    ),
    "masters count as missing": Mutant(
        "amp/_scaled_steps.py", "and not has_master(param, group)", "", "grad_scaler_skips"
    ),
    "the model is kept alive": Mutant(
        "amp/grad_scaler.py",
        "None if model is None else weakref.ref(model)",
        "None if model is None else lambda: model",
        "grad_scaler_skips",
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
        "run_torchscript",
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
        "run_bfloat16",
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

PARTS = (AMP, FP16_UTILS, OPTIMIZERS, CHECKPOINTS, SCALER, MONITOR, OLD_SCRIPTS, DRAWN)
MUTANTS = {name: mutant for part in PARTS for name, mutant in part.items()}
