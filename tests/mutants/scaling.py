"""Wrong lines for amp/ and core/, which scale losses and unscale gradients."""

from __future__ import annotations

from mutant import Mutant

_EARLIER = "for scaler in self.earlier:\n            scaler.note_overflow("
_UNSCALED = "for guard in guards:\n            guard.scaled_by = "
_UPDATE = "self.value = self.value.update(should_skip)\n        self._has_overflow = "

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
        "guard.block = weakref.ref(block)",
        "pass",
        "amp_scale_loss",
    ),
    "gradients of masters that zero_grad set to zero are dropped": Mutant(
        "amp/_masters.py",
        "self._grads = _Grads.CLEARED",
        "pass",
        "amp_masters",
    ),
    "masters keep their gradients after a skipped step": Mutant(
        "amp/step_guard.py", "slots.params[row].grad = None", "pass", "amp_masters"
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
        "amp_masters",
    ),
    "masters begin with rounded values": Mutant(
        "amp/_masters.py",
        "originals.get(param, param).data.float()",
        "param.data.float()",
        "amp_masters",
    ),
    "state stays with the model's parameters": Mutant(
        "core/masters.py",
        "            if param in state:\n",
        "            if False:\n",
        "amp_masters",
    ),
    "gradients of a step count again": Mutant(
        "amp/_masters.py",
        "self._grads = _Grads.USED",
        "pass",
        "amp_masters",
    ),
    "a closure computes with old weights": Mutant(
        "amp/_masters.py",
        "            self.copy_to_model()\n            return closure()",
        "            return closure()",
        "amp_masters",
    ),
    "a model saves rounded weights": Mutant(
        "amp/_master_state.py",
        "tensor.float() if master is None else current(master, tensor)",
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
        "amp_cast_cache",
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
    "a float16 loss is warned of at any scale": Mutant(
        "amp/_scaled_losses.py", "if scale > _LARGEST:", "if True:", "grad_scaler_order"
    ),
    "some gradients of 0 are taken for all": Mutant(
        "amp/_scaled_steps.py", "not any(sum_sq)", "not all(sum_sq)", "grad_scaler_order"
    ),
    "a learning rate of 0 counts as lost updates": Mutant(
        "optimizers/_lost_updates.py",
        "return isinstance(lr, (int, float)) and lr == 0.0",
        "return False",
        "grad_scaler_skips",
    ),
    "after a warm-up nobody looks for lost updates": Mutant(
        "optimizers/_lost_updates.py",
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
        "grad_scaler_misuse",
    ),
    "a checkpoint has bounds that were not given": Mutant(
        "amp/_scale_bounds.py",
        "if state and self._bounds else state",
        "if state else state",
        "grad_scaler_misuse",
    ),
    "states of optimizers outlive a bounded update": Mutant(
        "amp/_scale_bounds.py",
        "self._per_optimizer_states.clear()",
        "pass",
        "grad_scaler_misuse",
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
    "the scale of an output on the CPU is not waited for": Mutant(
        "amp/grad_scaler.py",
        "copy_async(scale, outputs.device)",
        "scale.to(outputs.device, non_blocking=True)",
        "grad_scaler_devices",
    ),
    "a sparse gradient that parameters share is unscaled twice": Mutant(
        "amp/_unscaling.py",
        "[grad for _, grad in known.values()]",
        "[param.grad for param in params]",
        "grad_scaler_devices",
    ),
    "a child reads a scale on a GPU": Mutant(
        "core/forks.py", 'device.type == "cuda" and torch', "False and torch", "forks"
    ),
    "norms that were not measured are those of an edit": Mutant(
        "core/grads.py",
        "before is not None",
        "(before := before or {}) is not None",
        "fp16_optimizer_misuse",
    ),
    "overflows on two devices add up to no overflow of torch": Mutant(
        "core/found_inf.py", "flag.zero_()", "pass", "grad_slots"
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
        "optimizers/_lost_updates.py",
        "if found_inf or self._is_done:",
        "if self._is_done:",
        "grad_scaler_skips",
    ),
    "masters count as missing": Mutant(
        "optimizers/_lost_updates.py",
        "and not has_master(param, group)",
        "",
        "grad_scaler_skips",
    ),
    "the model is kept alive": Mutant(
        "amp/grad_scaler.py",
        "None if model is None else weakref.ref(model)",
        "None if model is None else lambda: model",
        "grad_scaler_skips",
    ),
}
