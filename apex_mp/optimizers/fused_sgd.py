"""FusedSGD: stochastic gradient descent with momentum, one call for the tensors of a group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import required

from apex_mp import _options, tensors
from apex_mp import grads as _grads
from apex_mp._state_checks import as_dict
from apex_mp._step_request import StepRequest
from apex_mp.device_scale import bring
from apex_mp.optimizers import _kept, _legacy_call, _sgd_state, _sgd_step
from apex_mp.optimizers._several_devices import Outcome, as_flag
from apex_mp.optimizers._sgd_state import BUFFER
from apex_mp.optimizers._sgd_step import Factors, Measured, Number, Row

Rows: TypeAlias = Sequence[Row]


class FusedSGD(torch.optim.Optimizer):
    """SGD with momentum (Sutskever et al. 2013), one fused pass over the tensors of each group.

    Equals `torch.optim.SGD` within rounding, and its `state_dict` can be loaded by that and the
    other way round. Parameters may be float16, bfloat16, float32 or float64 on CPU or CUDA, also on
    several devices; gradients of any of these dtypes. Momentum buffers and math are float32, for
    float64 parameters float64. Inside `torch.amp.GradScaler` the unscaling is part of the same
    pass, and float16 gradients are allowed unless `scaler.unscale_` is called. A captured
    CUDA graph keeps the options of its capture, but for an lr that is a tensor on the GPU.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element; needed here or in every group.
        momentum: Decay of the momentum buffers, not negative; 0 keeps none [0].
        dampening: Dampening of the momentum; not applied to a parameter's first gradient [0].
        weight_decay: Decay factor, not negative [0].
        nesterov: Step along the gradient plus momentum times buffer; needs momentum and no
            dampening [False].
        wd_after_momentum: Decay the weights themselves instead of adding L2 to the gradient
            [False].
        materialize_master_grads: No effect: a master's gradient is materialized when it is read
            [True].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [False].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        unscale_grads: Inside `torch.amp.GradScaler`, whether a step that is not skipped unscales
            `.grad` in place, as torch's fused optimizers do. None unscales all but float16
            gradients, in which small numbers would underflow [None].

    Raises:
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range, or a group has no lr.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to step(): it sets self.grad_scale and
    # self.found_inf around the call.
    _step_supports_amp_scaling = True
    # FP16_Optimizer need not copy masters to the model after step(output_params=...).
    _writes_output_params = True
    unscale_grads: bool | None = None  # for optimizers pickled before the option existed

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        max_grad_norm: float = 0.0,
        unscale_grads: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "max_grad_norm": max_grad_norm,
        }
        _check_hyperparameters(defaults)
        _check_nesterov(defaults)
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        _legacy_call.check_unscale_grads("FusedSGD", unscale_grads)
        self.unscale_grads = unscale_grads
        super().__init__(params, defaults)

    @property
    def wd_after_momentum(self) -> bool:
        """What the constructor was given."""
        return bool(self.defaults["wd_after_momentum"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks are the constructor's.

        Raises:
            TypeError: The operators cannot step a parameter: its dtype, layout or class.
            ValueError: A hyperparameter is out of range, or there is no lr.
        """
        if isinstance(param_group, dict):  # torch says so otherwise
            whole = {**self.defaults, **param_group}
            _check_hyperparameters(whole)
            _check_nesterov(whole)
        params, names = tensors.listed(param_group)
        number = len(self.param_groups)
        tensors.check_params("FusedSGD", number, params, tensors.not_steppable, names)
        super().add_param_group(param_group)

    # Traced, it would be compiled anew for every value of lr, and never faster. Not by
    # torch.compiler.disable, which imports the whole of Dynamo (a second) with this module.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | StepRequest | None = None,
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
            ValueError: `grads`, `output_params` or `grad_norms` do not fit the groups, or a
                hyperparameter has come out of range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = _legacy_call.scaling("FusedSGD", self, scale, grads)
        request = _legacy_call.request("FusedSGD", self, grads, output_params, grad_norms)
        with torch.no_grad():
            request.outcome = self._step(request, scale, found_inf)
        return loss

    step.takes_request = True  # type: ignore[attr-defined]

    def _step(
        self, request: StepRequest, scale: float | Tensor, found_inf: float | Tensor | None
    ) -> Outcome:
        groups = self.param_groups
        for group in groups:
            _check_numbers(group)
        rows, request.without_grad = _sgd_step.read(request, groups, self.state)
        home = _sgd_step.home_of(rows)
        waits = _sgd_step.host_waits_for(home)
        there = _sgd_step.number_on(home, scale)
        skip = None if found_inf is None else as_flag(found_inf, "FusedSGD")
        measured: Measured | None = None
        norms: Sequence[Number] = []
        if request.check or _sgd_step.must_measure(groups, request):
            measured = _sgd_step.measure(rows, len(groups), there, home)
            norms = measured.norms.tolist() if waits else measured.norms.unbind()
            if request.check:  # Then found_inf was not given.
                skip = as_flag(measured.found_inf, "FusedSGD")
        told = skip
        if skip is not None and (waits or _sgd_step.host_waits_for(skip.device)):
            if skip.item():
                _update(request, told)
                return Outcome(True, _known(norms))
            skip = None
        divisors = _sgd_step.clip_divisors(groups, request, there, norms, home)
        made = self._take(rows, Factors(there, divisors), skip)
        _update(request, told)
        if skip is None:
            self._settle(rows)
            return Outcome(False, _known(norms))
        if measured is None or not request.check:
            return Outcome(False, [])
        return self._tell(request, rows, made, measured.told(skip), measured.reader())

    def _take(self, rows: Rows, factors: Factors, skip: Tensor | None) -> dict[Tensor, Tensor]:
        """Step, unless `skip` is set; return the buffers that were made for it."""
        made = self._make_buffers(rows)
        fresh = self._fresh.items()
        flags = {param: flag for param, (buffer, flag) in fresh if self._holds(param, buffer)}
        try:
            _sgd_step.take(rows, self.param_groups, self.state, flags, factors, skip)
        except BaseException:
            self._take_back(made)
            raise
        self._steps_taken = self.__dict__.get("_steps_taken", 0) + 1
        return made

    def _tell(
        self,
        request: StepRequest,
        rows: Rows,
        made: Mapping[Tensor, Tensor],
        sent: Tensor,
        read: Callable[[Tensor], Outcome],
    ) -> Outcome:
        """Return the outcome of a step: read now, or left for the host to read later."""
        if not request.wait:
            request.sent, request.read = sent, read
            if made:
                request.undo_state = self._undo(made)
            return Outcome(False, [], is_known=False)
        known = read(sent)
        if known.found_inf:
            self._take_back(made)
        else:
            self._settle(rows)
        return known

    # State. A step of which the host has yet to hear may not have been taken. A buffer of zeros
    # then does as well as none, but for dampening, which spares a parameter's first gradient: so
    # that a device can tell which is the first, such a buffer has a flag there.

    @property
    def _fresh(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """Buffers that hold nothing yet, as far as the host knows, with flags; by parameter."""
        fresh: dict[Tensor, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_fresh_buffers", {})
        return fresh

    def _holds(self, param: Tensor, buffer: Tensor) -> bool:
        """Whether a buffer is still that of a parameter; another may have been loaded."""
        return self.state.get(param, {}).get(BUFFER) is buffer

    def _make_buffers(self, rows: Rows) -> dict[Tensor, Tensor]:
        """Give parameters the buffers that they lack, and return those.

        A buffer that lies in memory in another order than its parameter is laid anew.
        """
        made: dict[Tensor, Tensor] = {}
        for row in rows:
            group = self.param_groups[row.group]
            if not group["momentum"]:
                continue
            state = self.state[row.param]
            if torch.is_tensor(state.get(BUFFER)):
                state[BUFFER] = _grads.lie_as(state[BUFFER], row.param)
                continue
            buffer = state[BUFFER] = made[row.param] = _sgd_state.new_buffer(row.param)
            if group["dampening"]:
                self._fresh[row.param] = buffer, torch.ones((), device=row.param.device)
        return made

    def _settle(self, rows: Rows) -> None:
        """After a step that was taken: its buffers hold something."""
        for row in rows:
            self._fresh.pop(row.param, None)

    def _take_back(self, made: Mapping[Tensor, Tensor]) -> None:
        """A step that was skipped or refused leaves no buffers behind."""
        for param, buffer in made.items():
            if self._holds(param, buffer):
                del self.state[param][BUFFER]
                if not self.state[param]:
                    del self.state[param]
            self._fresh.pop(param, None)

    def _undo(self, made: Mapping[Tensor, Tensor]) -> Callable[[], None]:
        """Return what takes buffers back that a step has made, unless another step came since."""
        steps = self._steps_taken
        weak = weakref.ref(self)

        def undo() -> None:
            optimizer = weak()
            if optimizer is not None and optimizer._steps_taken == steps:
                optimizer._take_back(made)

        return undo

    def _drop_fresh_buffers(self) -> None:
        """Take away buffers that hold nothing yet, before others see them; the host waits."""
        for param, (buffer, flag) in [*self._fresh.items()]:
            if flag.item():
                self._take_back({param: buffer})
        self._fresh.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, under the names by which torch.optim.SGD has them."""
        self._drop_fresh_buffers()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a FusedSGD, or of a torch.optim.SGD.

        Options that the saved groups lack stay as they are here. Momentum buffers become float32
        (float64 for float64 parameters), whatever the parameter's dtype. Tensors are copied.

        Raises:
            TypeError, ValueError: Groups do not fit, a hyperparameter is out of range, a
                parameter's state is not that of SGD, or it was saved with maximize.
        """

        def adapt(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            adapted = _sgd_state.adapt(saved, self.param_groups, [*self.defaults])
            for group in adapted["param_groups"]:
                _check_hyperparameters({**self.defaults, **group})
            return adapted

        # As a hook it sees what the user's hooks have made of the state.
        handle = self.register_load_state_dict_pre_hook(adapt)
        try:
            super().load_state_dict(as_dict("FusedSGD", state_dict))
        finally:
            handle.remove()
        self._fresh.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._drop_fresh_buffers()
        own = ("materialize_master_grads", "set_grad_none", "unscale_grads")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "state": _kept.unpack(state["state"])})


def _update(request: StepRequest, found_inf: Tensor | None) -> None:
    """Bring the loss scale of a request that checks up to date."""
    scale = request.loss_scale
    if request.check and scale is not None and found_inf is not None:
        scale.update(bring(found_inf, scale.device))


def _known(norms: Sequence[Number]) -> list[float]:
    """Norms of the groups, if the host knows them; the last is that of all."""
    return [norm for norm in norms[:-1] if not isinstance(norm, Tensor)]


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    if lr is required:  # torch refuses a group that has none either
        group = {**group, "lr": 0.0}
    else:
        _options.check_lr("FusedSGD", lr)
    _check_numbers(group)


def _check_numbers(group: Mapping[str, Any]) -> None:
    """Check all but the range of lr: past a schedule's end it may be negative, as in torch."""
    _options.check_type("FusedSGD", "lr", group["lr"])
    for name in ("momentum", "weight_decay", "max_grad_norm"):
        _options.check_number("FusedSGD", name, group[name], at_least=0.0)
    _options.check_number("FusedSGD", "dampening", group["dampening"])


def _check_nesterov(group: Mapping[str, Any]) -> None:
    """Of new groups; a scheduler may take the momentum away for a while."""
    if group["nesterov"] and not (group["momentum"] > 0.0 and group["dampening"] == 0.0):
        raise ValueError(
            f"FusedSGD: nesterov is True, momentum {group['momentum']} and dampening "
            f"{group['dampening']}; it needs momentum and no dampening"
        )
