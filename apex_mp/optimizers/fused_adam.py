"""FusedAdam: Adam and AdamW, one call for all tensors on a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C, _options, tensors
from apex_mp._state_checks import as_dict
from apex_mp._step_request import Lists, Outcome, StepRequest
from apex_mp.optimizers import _adam_state, _kept, _legacy_call
from apex_mp.optimizers._several_devices import SeveralDevices

_Plan: TypeAlias = "_C.AdamPlan | SeveralDevices"


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019), one fused pass over all tensors.

    Equals `torch.optim.AdamW` (`adam_w_mode=True`) and `torch.optim.Adam` (False) within rounding,
    and its `state_dict` can be loaded by them and the other way round. Parameters may be float16,
    bfloat16, float32 or float64 on CPU or CUDA, also on several devices; gradients of any of these
    dtypes. Moments and math are float32, for float64 parameters float64. Inside
    `torch.amp.GradScaler` the unscaling is part of the same pass, and float16 gradients are
    allowed unless `scaler.unscale_` is called.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-3].
        bias_correction: Correct the moments' start at zero [True].
        betas: Decay of the first and second moment, each in [0, 1) [(0.9, 0.999)].
        eps: Added to the denominator, not negative [1e-8].
        eps_inside_sqrt: Add eps under the square root instead of outside [False].
        weight_decay: Decay factor, not negative [0].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        amsgrad: Not supported; there for its place in the signature [False].
        adam_w_mode: Decay the weights themselves (AdamW) instead of adding L2 to the gradient
            [True].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [False].
        capturable: No effect: a step can be captured in a CUDA graph anyway, after one outside of
            the capture, if all parameters are on one device; see `refresh_hyperparameters` [False].
        master_weights: Keep a float32 master of each float16 and bfloat16 parameter in
            `state[p]["master_param"]`, step it, and write the parameter in the same pass. After
            loading other weights into the model, drop the masters too [False].
        maximize: Maximise the objective instead of minimising it [False].
        unscale_grads: Inside `torch.amp.GradScaler`, whether a step that is not skipped unscales
            `.grad` in place, as torch's fused optimizers do. None unscales all but float16
            gradients, in which small numbers would underflow [None].

    Raises:
        RuntimeError: `amsgrad` is asked for.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to step(): it sets self.grad_scale and
    # self.found_inf around the call.
    _step_supports_amp_scaling = True
    # FP16_Optimizer need not copy masters to the model after step(output_params=...).
    _writes_output_params = True
    unscale_grads: bool | None = None  # for optimizers pickled before the option existed
    _plan: _Plan

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        set_grad_none: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        maximize: bool = False,
        unscale_grads: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "adam_w_mode": adam_w_mode,
            "eps_inside_sqrt": eps_inside_sqrt,
            "master_weights": master_weights,
        }
        _check_hyperparameters(defaults)
        _legacy_call.check_unscale_grads("FusedAdam", unscale_grads)
        self.unscale_grads = unscale_grads
        super().__init__(params, defaults)

    @property
    def eps_mode(self) -> int:
        """0 if eps is added inside the square root, else 1: the old name."""
        return 0 if self.defaults["eps_inside_sqrt"] else 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks are the constructor's.

        Raises:
            RuntimeError: `amsgrad` is asked for.
            TypeError: The operators cannot step a parameter: its dtype, layout or class.
            ValueError: A hyperparameter is out of range.
        """
        if isinstance(param_group, dict):  # torch says so otherwise
            _check_hyperparameters({**self.defaults, **param_group})
        params, names = tensors.listed(param_group)
        number = len(self.param_groups)
        tensors.check_params("FusedAdam", number, params, tensors.not_steppable, names)
        super().add_param_group(param_group)

    # Traced, it would be compiled anew for every value of lr, and never faster. Not by
    # torch.compiler.disable, which imports the whole of Dynamo (a second) with this module.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | None = None,
        output_params: Iterable[Any] | None = None,
        scale: float | Tensor = 1.0,
        grad_norms: Iterable[float | Tensor] | None = None,
    ) -> Any:
        """Take one step with every parameter that has a gradient.

        Without arguments the gradients are each parameter's `.grad`. The other forms are the legacy
        call of `FP16_Optimizer`.

        Args:
            closure: Computes the loss again and returns it.
            grads: Gradients instead of `.grad`: a list for each group, or one flat list or
                generator over all parameters; None where there is none.
            output_params: Where each new parameter is also written in the output's dtype (fp16
                model parameters, if `params` are their fp32 masters): as `grads`.
            scale: The gradients are divided by it: the loss scale.
            grad_norms: l2 norm of each group's gradients as given, that is, of the scaled ones;
                saves the pass that `max_grad_norm` otherwise costs.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: A gradient is sparse, does not fit its parameter, or is on a device that
                this build has no kernels for; or a step on several devices is captured in a graph.
            ValueError: `grads`, `output_params` or `grad_norms` do not fit the groups.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = _legacy_call.scaling("FusedAdam", self, scale, grads)
        request = _legacy_call.request("FusedAdam", self, grads, output_params, grad_norms)
        with torch.no_grad():
            self._step_by_plan(request, scale, found_inf)
        return loss

    step.takes_request = True  # type: ignore[attr-defined]

    def _step_by_plan(
        self, request: StepRequest, scale: float | Tensor, found_inf: Tensor | None
    ) -> None:
        """Step all groups at once."""
        plan = self.__dict__.get("_plan")
        if plan is None:  # also after pickle and deepcopy
            plan = self._plan = _C.AdamPlan()
        needs = self._read(plan, request, scale)
        if not plan.can_run:  # Parameters have come to several devices, or back to one.
            plan = _C.AdamPlan() if isinstance(plan, SeveralDevices) else SeveralDevices()
            self._plan = plan
            needs = self._read(plan, request, scale)
        self._steps_taken = self.__dict__.get("_steps_taken", 0) + 1
        before: dict[Tensor, dict[str, Any] | None] = {}
        try:
            if needs:
                for group, index in needs:
                    param_group = self.param_groups[group]
                    param = param_group["params"][index]
                    before[param] = self.state.get(param)
                    self._make_state(param, param_group)
                self._read(plan, request, scale)
            request.outcome = _run(plan, request, found_inf)
        except BaseException:
            self._take_back(before)
            raise
        request.without_grad = plan.without_grad
        if not request.outcome.is_known:
            request.sent, request.read = plan.outcome, plan.read_outcome
            if before:
                request.undo_state = self._undo(before)
        if request.outcome.found_inf:
            self._take_back(before)

    def _read(
        self, plan: _Plan, request: StepRequest, scale: float | Tensor
    ) -> list[tuple[int, int]]:
        return plan.read(
            self.param_groups,
            self.state,
            grads=request.grads,
            grads_of=request.grads_of,
            copies=request.copies,
            scale=scale,
            norms=request.norms,
            unscale=request.unscale,
        )

    def refresh_hyperparameters(self) -> None:
        """Have the step in a captured CUDA graph use the groups' options as they are now.

        Call it between replays, outside of a capture, after a scheduler or a hand has changed
        `param_groups`. Steps that are not replayed need no call, nor does a tensor as `lr`.
        """
        plan: _Plan | None = self.__dict__.get("_plan")
        if plan is not None:
            nothing: Lists = [[None] * len(group["params"]) for group in self.param_groups]
            with torch.no_grad():
                self._read(plan, StepRequest(grads=nothing), 1.0)
                plan.refresh_groups()

    def _make_state(self, param: Tensor, group: dict[str, Any]) -> None:
        """Give a parameter what its state lacks, and lay out anew what lies in another order."""
        self.state[param] = _adam_state.completed(
            self.state.get(param, {}), param, with_master=_has_master(param, group)
        )

    def _undo(self, before: dict[Tensor, dict[str, Any] | None]) -> Callable[[], None]:
        """Return a function that removes the state a step has made, unless it has been used."""
        made = {param: self.state[param] for param in before}
        steps = self._steps_taken
        weak = weakref.ref(self)

        def undo() -> None:
            optimizer = weak()
            if (
                optimizer is not None
                and optimizer._steps_taken == steps
                and all(optimizer.state.get(param) is state for param, state in made.items())
            ):
                optimizer._take_back(before)

        return undo

    def _take_back(self, before: dict[Tensor, dict[str, Any] | None]) -> None:
        """A step that was skipped or refused leaves no state behind."""
        for param, state in before.items():
            if state is None:
                self.state.pop(param, None)
            else:
                self.state[param] = state

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, also under the names by which torch.optim.Adam has them."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["decoupled_weight_decay"] = group["adam_w_mode"]
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a FusedAdam, or of a torch.optim.Adam or AdamW.

        Options that the saved groups lack stay as they are here. Moments become float32 (float64
        for float64 parameters), whatever the parameter's dtype. Tensors are copied.

        Raises:
            RuntimeError: The state was saved with amsgrad.
            TypeError, ValueError: Groups do not fit, a hyperparameter is out of range, or a
                parameter's state is not that of Adam.
        """

        def adapt(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            adapted = _adam_state.adapt(saved, self.param_groups, [*self.defaults])
            for group in adapted["param_groups"]:
                _check_hyperparameters({**self.defaults, **group})
            return adapted

        # As a hook it sees what the user's hooks have made of the state.
        handle = self.register_load_state_dict_pre_hook(adapt)
        try:
            super().load_state_dict(as_dict("FusedAdam", state_dict))
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "unscale_grads": self.unscale_grads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "state": _kept.unpack(state["state"])})


def _run(plan: _Plan, request: StepRequest, found_inf: Tensor | None) -> Outcome:
    wishes: dict[str, Any] = {
        "found_inf": found_inf,
        "check": request.check,
        "clip_by_global_norm": request.clip_by_global_norm,
        "wait": request.check and request.wait,
    }
    scale = request.loss_scale
    if isinstance(plan, SeveralDevices):
        return plan.run(loss_scale=scale, **wishes)
    return plan.run(loss_scale=None if scale is None else scale.for_step(), **wishes)


def _has_master(param: Tensor, group: Mapping[str, Any]) -> bool:
    return group["master_weights"] and param.dtype in (torch.float16, torch.bfloat16)


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    _adam_state.check_amsgrad(group)
    if isinstance(group["bias_correction"], (tuple, list)):
        raise TypeError(
            f"FusedAdam: bias_correction is {group['bias_correction']}; it must be True or False. "
            "Betas are given as betas="
        )
    _options.check_lr("FusedAdam", group["lr"])
    for name in ("eps", "weight_decay", "max_grad_norm"):
        _options.check_number("FusedAdam", name, group[name], at_least=0.0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"FusedAdam: betas is {betas!r}; it must be two numbers in [0, 1)")
    for beta in betas:
        _options.check_number("FusedAdam", "one of betas", beta)
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"FusedAdam: betas is {betas}; it must be two numbers in [0, 1)")
