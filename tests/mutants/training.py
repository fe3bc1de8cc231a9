"""Wrong lines for fp16_utils/ and optimizers/."""

from __future__ import annotations

from mutant import Mutant

_FLAT_ZERO = "place.zero_() if param.grad is None else place.copy_"
_FLAT_OLD = "None if param.grad is None else place.copy_"
_UNDONE = "if not plan.has_run:"
_NOT_UNDONE = "if False:"

FP16_UTILS = {
    "a legacy step gets no loss scale": Mutant(
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
    "inf of an edit is not noticed": Mutant(
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
        "fp16_optimizer_accumulation",
    ),
    "FP16_Optimizer keeps an abandoned line search": Mutant(
        "fp16_utils/_stepping.py",
        "            before.restore(self.state)\n",
        "",
        "fp16_optimizer_accumulation",
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
    "a Ctrl-C takes back the state of a step that was taken": Mutant(
        "optimizers/_fused.py", _UNDONE, "if True:", "random_programs_today"
    ),
    "a skipped first step leaves new state": Mutant(
        "optimizers/_fused.py",
        "if outcome.found_inf:\n            self._take_back(before)",
        "if False:\n            self._take_back(before)",
        "fp16_optimizer_overflow",
    ),
    "torch.optim.Adam gets the other decay": Mutant(
        "optimizers/fused_adam.py",
        'group["decoupled_weight_decay"] = group["adam_w_mode"]',
        'group["decoupled_weight_decay"] = not group["adam_w_mode"]',
        "fused_adam_state",
    ),
    "a remainder outlives what was written to its weight": Mutant(
        "optimizers/_written.py",
        "master.zero_()",
        "pass",
        "split_masters",
    ),
    "a master outlives what was written to its weight": Mutant(
        "optimizers/_written.py",
        "master.copy_(torch.where(differs, weight, master))",
        "pass",
        "written_weights",
    ),
    "all of a master is taken from its weight": Mutant(
        "optimizers/_written.py",
        "master.copy_(torch.where(differs, weight, master))",
        "master.copy_(weight)",
        "written_weights",
    ),
    "a file turns off the masters that were asked for": Mutant(
        "optimizers/_saved.py",
        'if group.get("master_weights"):',
        'if group.get("master_weights") and saved_group.get("master_weights"):',
        "written_weights",
    ),
    "a parameter in float32 keeps its master": Mutant(
        "optimizers/_state.py",
        "whole.pop(MASTER, None)",
        "pass",
        "written_weights",
    ),
    "weights of the other 16-bit dtype are taken as written": Mutant(
        "core/written_weights.py",
        "torch.where(differs_from_other.any(), differs, differs_from_other)",
        "differs",
        "written_weights",
    ),
    "a tie of a split master is taken as written": Mutant(
        "core/written_weights.py",
        "(weight != nearest) & (weight != larger)",
        "(weight != nearest)",
        "written_weights",
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
    "FusedAdam does not get the decay of torch.optim.Adam": Mutant(
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
        "fused_rules_in_wrappers",
    ),
}
