"""Wrong lines for amp/ and core/, which scale losses and unscale gradients."""

from __future__ import annotations

from mutant import Mutant

AMP = {
    "an overflow does not reach earlier losses": Mutant(
        "_OverflowDecision.apply",
        "scaler.note_overflow(overflowed)",
        "scaler.note_overflow(False)",
        "amp_scale_loss_steps",
    ),
    "a loss of two blocks updates its scale twice": Mutant(
        "scaled_backward", "earlier.pop(id(scaler), None)", "", "amp_scale_loss_steps"
    ),
    "unscaled gradients count as scaled": Mutant(
        "scaled_backward",
        "guard.scaled_by = None",
        "guard.scaled_by = guard.scaled_by",
        "stages",
    ),
    "a float16 loss is scaled in float16": Mutant(
        "_wide", "loss if loss.dtype is torch.float64 else loss.float()", "loss", "amp_scale_loss"
    ),
    "two blocks of one optimizer may be open": Mutant(
        "_open_blocks", "guard.block = weakref.ref(block)", "", "stages"
    ),
    "gradients of masters that zero_grad set to zero are dropped": Mutant(
        "OptimizerMasters.cleared", "self._grads = _Grads.CLEARED", "", "amp_masters"
    ),
    "masters keep their gradients after a skipped step": Mutant(
        "StepGuard._step_or_skip", "slots.params[row].grad = None", "", "amp_masters"
    ),
    "a step takes scaled gradients": Mutant(
        "StepGuard._take_step",
        "self.check(Event.PLAIN_STEP)",
        "",
        "stages",
    ),
    "an abandoned line search is kept": Mutant(
        "StepGuard._step_with_closure", "before.restore(state)", "", "amp_scale_loss_steps"
    ),
    "the guard of an optimizer guards its copies": Mutant(
        "guarded_step",
        "vars(optimizer).get('_amp_step_guard') is not self",
        "False",
        "amp_scale_loss",
    ),
    "frozen parameters get masters": Mutant(
        "Masters.adopt",
        "param.dtype in LOW_PRECISION and param.requires_grad",
        "param.dtype in LOW_PRECISION",
        "ways_gradients",
    ),
    "masters begin with rounded values": Mutant(
        "master_of", "originals.get(param, param)", "param", "amp_masters"
    ),
    "state stays with the model's parameters": Mutant(
        "Masters.adopt", "param in state", "False", "amp_masters"
    ),
    "gradients of a step count again": Mutant(
        "OptimizerMasters.after_step", "self._grads = _Grads.USED", "", "amp_masters"
    ),
    "a closure computes with old weights": Mutant(
        "wrapper", "self.copy_to_model()", "", "amp_masters"
    ),
    "a model saves rounded weights": Mutant(
        "MasterState.save",
        "tensor.float() if master is None else joined(tensor, master)",
        "tensor.float()",
        "amp_opt_levels",
    ),
    "a cast of another dtype is taken": Mutant(
        "CastCache.get_cast",
        "done is None or done.dtype is not dtype",
        "done is None",
        "amp_cast_cache",
    ),
    "a cast outlives an edit of its weight": Mutant(
        "CastCache.get_cast",
        "done if getattr(done, '_source', None) == source else None",
        "done",
        "amp_cast_cache",
    ),
    "a float32 result is computed in low precision": Mutant(
        "Caster.to_low",
        "isinstance(out, Tensor) and out.dtype is torch.float32",
        "False",
        "amp_casts",
    ),
    "in-place operators cast the other way": Mutant(
        "Caster.match_first",
        "torch.float32 if target is low else low",
        "low if target is low else torch.float32",
        "amp_policy",
    ),
    "casts end with the first function that is not cast inside": Mutant(
        "Caster.call_uncast", "torch.set_autocast_enabled(device_type, True)", "", "amp_casts"
    ),
    "a cast made in inference mode is kept": Mutant(
        "_may_be_kept", "torch.is_inference_mode_enabled()", "False", "amp_cast_cache"
    ),
    "a namedtuple becomes a tuple": Mutant(
        "map_items", "value._make(items)", "tuple(items)", "amp_casts"
    ),
    "the inner of two disable_casts switches casts on": Mutant(
        "Switch.casts_off", "thread.off -= 1", "thread.off = 0", "amp_threads"
    ),
    "patches are put back in the order of their coming": Mutant(
        "Patches.remove_all",
        "[*self._patches.values()][::-1]",
        "[*self._patches.values()]",
        "amp_patching",
    ),
    "a loss scale starts above its bound": Mutant(
        "LossScaler.__init__",
        "dataclasses.replace(value, scale=min(value.scale, value.max_scale))",
        "value",
        "amp_scaler",
    ),
    "gradients that overflowed and were set aside are stepped": Mutant(
        "StepGuard._resolve_suspect", "self._overflow = suspect", "", "apex_inside"
    ),
    "16-bit gradients put no floor under a scale": Mutant(
        "LossScaler.note_16_bit_gradients",
        "not self._has_floor and isinstance(value, DynamicLossScale)",
        "False",
        "grad_scaler_lowest",
    ),
    "NaN at a scale of 1 is said once more": Mutant(
        "StepRecord.end", "self.has_named_cause = True", "", "step_record"
    ),
    "a client's overflow buffer is not read": Mutant(
        "LossScaler.update_scale", "bool(self._buffer.item())", "False", "apex_inside"
    ),
    "a client's own block adds scaled gradients": Mutant(
        "AmpOptimizerState._end_backward", "grads.unscale(unscaling)", "", "apex_inside"
    ),
    "backing off renews hysteresis": Mutant(
        "DynamicLossScale.update",
        "self._next(self._backed_off(), good_steps=0, overflows=self.overflows)",
        "self._next(self._backed_off(), good_steps=0, overflows=0)",
        "loss_scale",
    ),
    "an overflow counts for every later step": Mutant(
        "LossScaler.update_scale",
        "self._overflowed, self._is_counted = (should_skip, True)",
        "self._overflowed, self._is_counted = (should_skip, False)",
        "amp_scaler",
    ),
    "gradients are added up in another order of memory": Mutant(
        "LossGrads._assign", "match_strides(grad, part)", "grad", "amp_scale_loss"
    ),
    "a block that raised loses the gradients before it": Mutant(
        "LossGrads.restore",
        "source.grad = stashed.source_grad",
        "source.grad = None",
        "amp_scale_loss_steps",
    ),
    "gradients left scaled are scaled once more": Mutant(
        "LossGrads.scale_by", "scale / (scaled_by or 1.0)", "scale", "stages"
    ),
    "an optimizer skips for what another one's gradients hold": Mutant(
        "_OverflowDecision.apply", "overflowed or found_in_sum", "True", "amp_scale_loss"
    ),
    "unscaling into float16 may overflow unseen": Mutant(
        "LossGrads._check_low",
        "{id(grad): grad for grad in grads if grad.dtype is torch.float16}",
        "{id(grad): grad for grad in () if grad.dtype is torch.float16}",
        "amp_scale_loss",
    ),
}

SCALER = {
    "a clip is forgotten by the step": Mutant(
        "_step_fused",
        "[] if iteration.clip is None else [iteration.clip.divisor]",
        "[]",
        "ways_gradients",
    ),
    "a clip is forgotten by unscale_": Mutant(
        "GradScaler._unscale",
        "inv_scale = inv_scale / clip.divisor",
        "",
        "ways_gradients",
    ),
    "a clip makes small gradients larger": Mutant(
        "found_inf.clip_divisor",
        "torch.clamp((norm.double() + _ADDED_TO_NORM) / max_norm, min=1.0)",
        "(norm.double() + _ADDED_TO_NORM) / max_norm",
        "ways_gradients",
    ),
    "the norm is that of scaled gradients": Mutant(
        "stepping.clip",
        "scaler._measure(iteration, grads, scale).norm(scale.device) / scale",
        "scaler._measure(iteration, grads, scale).norm(scale.device)",
        "ways_gradients",
    ),
    "an infinite norm makes gradients NaN before they are counted": Mutant(
        "found_inf.clip_divisor",
        "torch.where(norm.isfinite(), divisor, 1.0)",
        "divisor",
        "ways_skips",
    ),
    "what clipping has found is looked for again": Mutant(
        "GradScaler._check_inf_per_device",
        "iteration.clip is None",
        "True",
        "grad_scaler_clip",
    ),
    "gradients after a clip are taken for those that were measured": Mutant(
        "Iteration.after",
        "event in _SHOWING_EDITS and stage in _EDITABLE and self._are_changed()",
        "False",
        "stages",
    ),
    "a plain step takes gradients that clipping left scaled": Mutant(
        "Iteration.clip_in_step",
        "self._refuse_plain_step",
        "lambda *_: None",
        "stages",
    ),
    "a clip is lost by an update before the step": Mutant(
        "Iteration.end", "self.enter(new)", "self.enter(Stage.READY)", "stages"
    ),
    "an iteration that was given up is remembered": Mutant(
        "Iteration.after", "stage in _EDITABLE", "stage is Stage.CLIPPED", "stages"
    ),
    "a loss that was not scaled is no mistake after the first": Mutant(
        "GradScaler.update", "self._is_loss_scaled = False", "", "grad_scaler_misuse"
    ),
    "a float16 loss is warned of at any scale": Mutant(
        "GradScaler._warn_of_float16",
        "scale > torch.finfo(torch.float16).max",
        "True",
        "grad_scaler_misuse",
    ),
    "gradients of any norm are taken for 0": Mutant(
        "ScaledSteps._finish", "norm == 0.0", "norm is not None", "grad_scaler_misuse"
    ),
    "a step before the first loss is taken note of": Mutant(
        "GradScaler._begin",
        "scale, _ = self._check_scale_growth_tracker(call)",
        "scale = torch.ones(())",
        "grad_scaler_misuse",
    ),
    "gradients that wait have the present scale": Mutant(
        "Iteration.scale", "stage is Stage.WAITING", "False", "stages"
    ),
    "a clip forgets the scale of gradients that wait": Mutant(
        "Iteration.scale", "self._clip is not None", "False", "stages"
    ),
    "torch's fused optimizers divide by the present scale": Mutant(
        "_step_fused", "scale is not scaler._scale", "False", "stages"
    ),
    "gradients of 0 wait": Mutant(
        "Iteration._are_zero", "before[1].item() == 0.0", "False", "stages"
    ),
    "zeros make a sum of two scales": Mutant(
        "Iteration._note_before", "self._before[1] == 0.0", "False", "stages"
    ),
    "gradients that a graph may write wait": Mutant(
        "Iteration.end", "is_in_graph or readback.is_capturing()", "False", "stages"
    ),
    "a stage that a subclass writes is ignored": Mutant(
        "GradScaler._iteration", "iteration.follow_torch()", "", "stages"
    ),
    "FSDP1 is taken": Mutant(
        "refuse_fsdp1", "getattr(param, '_fsdp_flattened', False)", "False", "grad_scaler_misuse"
    ),
    "any device is taken": Mutant(
        "_checked_device", "kind in ('cuda', 'cpu')", "True", "grad_scaler_misuse"
    ),
    "a state of another scaler is half loaded": Mutant(
        "GradScaler.load_state_dict",
        "state and missing",
        "False",
        "grad_scaler_misuse",
    ),
    "a refused step leaves its scale with the optimizer": Mutant(
        "_step_fused", "delattr(optimizer, name)", "", "grad_scaler_around_steps"
    ),
    "a closure by place is called": Mutant(
        "GradScaler.step", "args and callable(args[0])", "False", "grad_scaler_misuse"
    ),
    "bounds are not loaded": Mutant(
        "GradScaler.load_state_dict",
        "{name: state.get(name, bound) for name, bound in bounds.items()}",
        "bounds",
        "grad_scaler_misuse",
    ),
    "a checkpoint has bounds that were not given": Mutant(
        "GradScaler.state_dict", "state and self._has_bounds", "state", "grad_scaler_misuse"
    ),
    "states of optimizers outlive a bounded update": Mutant(
        "GradScaler.update",
        "self._per_optimizer_states.clear()",
        "",
        "grad_scaler",
    ),
    "a shared gradient is unscaled twice": Mutant(
        "unscale",
        "first.setdefault(id(grad), (row, grad))",
        "first.setdefault(row, (row, grad))",
        "grad_scaler",
    ),
    "saving a new run counts as a step": Mutant(
        "FusedOptimizer.step", "state['step'].zero_()", "", "distributed_checkpoint"
    ),
    "what is not divided counts once for each process": Mutant(
        "_shares", "1.0 if divided else 1.0 / size", "1.0", "shards"
    ),
    "each process clips by the norm of its own parts": Mutant(
        "Engine._must_agree", "plan.has_parts or self._processes is not None", "False", "shards"
    ),
    "processes with other loss scales train together": Mutant(
        "_compare", "their_scale != scale", "False", "shards"
    ),
    "processes are compared at each step": Mutant(
        "agree", "groups and first not in _COMPARED", "groups", "shards"
    ),
    "inf in one process is unknown to the others": Mutant(
        "agree", "(flag != 0.0).float()", "flag.float() * 0.0", "shards"
    ),
    "what is found later hides what was found before": Mutant(
        "FoundInf.add", "torch.maximum(flag, found)", "found", "grad_slots"
    ),
    "the scale of an output on the CPU is not waited for": Mutant(
        "GradScaler._scaled",
        "copy_async(scale, outputs.device)",
        "scale.to(outputs.device, non_blocking=True)",
        "grad_scaler_devices",
    ),
    "a sparse gradient that parameters share is unscaled twice": Mutant(
        "_unscale_others",
        "[grad for _, grad in known.values()]",
        "[param.grad for param in params]",
        "grad_scaler_devices",
    ),
    "a child reads a scale on a GPU": Mutant(
        "refuse_read", "device.type == 'cuda'", "False", "forks"
    ),
    "norms that were not measured are those of an edit": Mutant(
        "EditWatch.find",
        "before is not None",
        "(before := (before or {})) is not None",
        "fp16_optimizer_misuse",
    ),
    "overflows on two devices add up to no overflow of torch": Mutant(
        "FoundInf.join", "flag.zero_()", "", "grad_slots"
    ),
    "names of a step are those of gradients that came since": Mutant(
        "ScaledSteps._report_of",
        "sum((param.grad is None for param in params)) == len(result.without_grad)",
        "True",
        "grad_scaler_skips",
    ),
    "masters count as missing": Mutant(
        "warn_of_lost_updates",
        "not has_master(param, group, optimizer)",
        "True",
        "lost_updates",
    ),
    "the model is kept alive": Mutant(
        "GradScaler.__init__", "weakref.ref(model)", "lambda: model", "ways_skips"
    ),
}
