"""FusedSGD: stochastic gradient descent with momentum, one call for the tensors of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import required

from apex_mp import _options
from apex_mp import grads as _grads
from apex_mp._step_request import StepRequest, StepResult
from apex_mp.device_scale import bring
from apex_mp.optimizers import _sgd_step
from apex_mp.optimizers._fused import Before, FusedOptimizer
from apex_mp.optimizers._several_devices import Outcome, as_flag
from apex_mp.optimizers._sgd_step import BUFFER, Factors, Measured, Number, Row
from apex_mp.optimizers._state import StateLayout

Rows: TypeAlias = Sequence[Row]


class FusedSGD(FusedOptimizer):
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

    _public_name = "FusedSGD"
    _state_layout = StateLayout("an SGD", tensors=(BUFFER,))
    _pickled = ("materialize_master_grads", "set_grad_none", "unscale_grads")

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
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults, unscale_grads)

    @property
    def wd_after_momentum(self) -> bool:
        """What the constructor was given."""
        return bool(self.defaults["wd_after_momentum"])

    def _check_options(self, group: Mapping[str, Any]) -> None:
        if group["lr"] is required:  # torch refuses a group that has none either
            group = {**group, "lr": 0.0}
        _options.check_lr("FusedSGD", group["lr"])
        _check_numbers(group)

    def _check_new_options(self, group: Mapping[str, Any]) -> None:
        """Check nesterov too; later a scheduler may take the momentum away for a while."""
        self._check_options(group)
        if group["nesterov"] and not (group["momentum"] > 0.0 and group["dampening"] == 0.0):
            raise ValueError(
                f"FusedSGD: nesterov is True, momentum {group['momentum']} and dampening "
                f"{group['dampening']}; it needs momentum and no dampening"
            )

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        if group.get("maximize"):
            raise ValueError(
                f"FusedSGD.load_state_dict: param_groups[{number}] has maximize=True, which "
                "FusedSGD does not have; negate the loss instead"
            )

    def _adapt_state(self, where: str, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        if BUFFER in state and state[BUFFER] is None:
            # torch's, of a parameter that has had no gradient
            return {key: value for key, value in state.items() if key != BUFFER}
        return super()._adapt_state(where, state, param)

    def refresh_hyperparameters(self) -> None:
        """Raise an error: a captured CUDA graph keeps the options of its capture."""
        raise NotImplementedError(
            "FusedSGD: a captured CUDA graph keeps the options of its capture; give lr as a tensor "
            "on the GPU and write to it"
        )

    def _step_by_plan(
        self, request: StepRequest, scale: float | Tensor, found_inf: Tensor | None
    ) -> StepResult:
        groups = self.param_groups
        for group in groups:
            _check_numbers(group)
        rows, without_grad = _sgd_step.read(request, groups, self.state)
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
                return StepResult(Outcome(True, _known(norms)), without_grad)
            skip = None
        divisors = _sgd_step.clip_divisors(groups, request, there, norms, home)
        before = self._take(rows, Factors(there, divisors), skip)
        _update(request, told)
        if skip is None:
            self._settle(rows)
            return StepResult(Outcome(False, _known(norms)), without_grad)
        if measured is None or not request.check:
            return StepResult(Outcome(False, []), without_grad)
        sent, read = measured.told(skip), measured.reader()
        if not request.wait:
            undo = self._undo(before) if before else None
            return StepResult(Outcome(False, [], is_known=False), without_grad, sent, read, undo)
        known = read(sent)
        if known.found_inf:
            self._take_back(before)
        else:
            self._settle(rows)
        return StepResult(known, without_grad)

    def _take(self, rows: Rows, factors: Factors, skip: Tensor | None) -> Before:
        """Step, unless `skip` is set; return the state before the buffers that were made for it."""
        before = self._make_buffers(rows)
        fresh = self._fresh.items()
        flags = {param: flag for param, (buffer, flag) in fresh if self._holds(param, buffer)}
        try:
            _sgd_step.take(rows, self.param_groups, self.state, flags, factors, skip)
        except BaseException:
            self._take_back(before)
            raise
        self._count_step()
        return before

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

    def _make_buffers(self, rows: Rows) -> Before:
        """Give parameters the buffers that they lack, and return the state that those had before.

        A buffer that lies in memory in another order than its parameter is laid anew.
        """
        before: Before = {}
        for row in rows:
            group = self.param_groups[row.group]
            if not group["momentum"]:
                continue
            buffer = self.state.get(row.param, {}).get(BUFFER)
            if torch.is_tensor(buffer):
                self.state[row.param][BUFFER] = _grads.lie_as(buffer, row.param)
                continue
            state = self._make_state(before, row.group, row.index)
            if group["dampening"]:
                self._fresh[row.param] = state[BUFFER], torch.ones((), device=row.param.device)
        return before

    def _settle(self, rows: Rows) -> None:
        """After a step that was taken: its buffers hold something."""
        for row in rows:
            self._fresh.pop(row.param, None)

    def _take_back(self, before: Before) -> None:
        super()._take_back(before)
        for param in before:
            self._fresh.pop(param, None)

    def _drop_fresh_buffers(self) -> None:
        """Take away buffers that hold nothing yet, before others see them; the host waits."""
        for param, (buffer, flag) in [*self._fresh.items()]:
            if flag.item() and self._holds(param, buffer):
                state = self.state[param]
                self._take_back(
                    {param: {key: state[key] for key in state if key != BUFFER} or None}
                )
        self._fresh.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, under the names by which torch.optim.SGD has them."""
        self._drop_fresh_buffers()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._fresh.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._drop_fresh_buffers()
        return super().__getstate__()


def _update(request: StepRequest, found_inf: Tensor | None) -> None:
    """Bring the loss scale of a request that checks up to date."""
    scale = request.loss_scale
    if request.check and scale is not None and found_inf is not None:
        scale.update(bring(found_inf, scale.device))


def _known(norms: Sequence[Number]) -> list[float]:
    """Norms of the groups, if the host knows them; the last is that of all."""
    return [norm for norm in norms[:-1] if not isinstance(norm, Tensor)]


def _check_numbers(group: Mapping[str, Any]) -> None:
    """Check all but the range of lr: past a schedule's end it may be negative, as in torch."""
    _options.check_type("FusedSGD", "lr", group["lr"])
    for name in ("momentum", "weight_decay", "max_grad_norm"):
        _options.check_number("FusedSGD", name, group[name], at_least=0.0)
    _options.check_number("FusedSGD", "dampening", group["dampening"])
