"""FP16_Optimizer: scaled loss, fp32 masters and skipped overflows around any optimizer."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from apex_mp.core import device_scale, grads, parallel_masters, step_log, tensors
from apex_mp.core.checkpoint_view import CheckpointView, with_checkpoint_view
from apex_mp.core.closure import Snapshot, StepAbandonedError, evaluate
from apex_mp.core.found_inf import FoundInf
from apex_mp.core.inner import (
    StepWatch,
    check_loss,
    checked_result,
    inner_of,
    legacy_arguments,
)
from apex_mp.core.log import logger
from apex_mp.core.master_grads import MasterGrads, Stage
from apex_mp.core.masters import LOW_PRECISION, MasterGroup
from apex_mp.core.skips import Overflow, ParamNames
from apex_mp.core.state_checks import as_dict
from apex_mp.core.step import Outcome, StepRequest, StepResult
from apex_mp.core.weight_watch import WeightWatch
from apex_mp.fp16_utils import _checkpoint, _inner_state
from apex_mp.fp16_utils._delegates import Delegates
from apex_mp.fp16_utils._device_steps import DeviceSteps
from apex_mp.fp16_utils._given_scale import new_scaler
from apex_mp.fp16_utils._misuse import Misuse
from apex_mp.fp16_utils._old_names import OldNames
from apex_mp.fp16_utils._saved_scaler import whole_scaler
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import DynamicLossScale, LossScale, is_of_grad_scaler

_LOG = logger("apex_mp.fp16_utils")
# Dynamo cannot trace what these methods do; torch keeps it out of its own optimizers this way.
_eager = torch._disable_dynamo  # type: ignore[attr-defined]
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_ADVICE_FOR_WRITES = (
    "Write weights to optimizer.param_groups too, load them by apex_mp.convert.load(model, "
    "state_dict, optimizer), or make FP16_Optimizer after them"
)
_SCALE_NOT_NEEDED = (
    "Warning:  FP16_Optimizer: gradients in bfloat16 do not underflow; a dynamic loss scale is not "
    "needed"
)
_STALE_GRADS = (
    "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.  "
    "Gradients are currently invalid (may be inf, nan, or stale).  Returning None."
)


class FP16_Optimizer(OldNames, Delegates):
    """Train float16 (or bfloat16) parameters with any optimizer, on fp32 masters.

    Wrapping puts an fp32 master in place of every low-precision parameter that requires grad, into
    the inner optimizer's own parameter lists. Then

        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        ...
        optimizer.zero_grad()
        optimizer.backward(loss)        # instead of loss.backward()
        optimizer.step()

    scales the loss, unscales the gradients, steps the masters and writes them, rounded, to the
    model. A step whose gradients hold inf or NaN is skipped, with a static loss scale too: nothing
    changes but the scale, and a message says which parameters hold them. Parameters of float32 may
    be mixed in; they are their own masters.

    Several `backward` calls before a `step` accumulate. `param_groups` holds the masters: their
    `.grad` is the unscaled gradient, and editing it (`clip_grad_norm_`) counts; on parameters of
    float32 too. An inner optimizer whose `step` takes `grads`, `output_params` and `scale`, as the
    fused ones do, is given the scaled gradients themselves, so that unscaling, clipping by its
    `max_grad_norm` and the copy to the model cost no pass of their own.

    Learning-rate schedulers take this object or the inner optimizer, also from before wrapping.

    Args:
        init_optimizer: Optimizer of the model's parameters. Also as `optimizer=`.
        static_loss_scale: Factor on the loss, or a value of `apex_mp.loss_scale` [1].
        dynamic_loss_scale: Adjust the factor to the gradients; overrides the static one. Or the
            loss scale itself: a value of `apex_mp.loss_scale`, which is followed exactly, or a
            scaler of this package or of amp [False].
        dynamic_loss_args: Arguments of `DynamicLossScaler`, for example `{"init_scale": 2**16}`;
            `init_scale` is 2**32 otherwise [None].
        verbose: Log (which prints) which parameters are wrapped, and why steps are skipped [True].
        optimizer: The same as `init_optimizer`.
        model: The module whose names an overflow message uses for its parameters; without it the
            message names group, index and shape [None].
        clip: For an inner optimizer with `max_grad_norm`: "group" clips each group by its own norm,
            "global" each by the norm over all groups, as `FusedLAMB` always does ["group"].

    Attributes:
        optimizer: The inner optimizer.
        loss_scaler: A `LossScaler` or `DynamicLossScaler`.

    Raises:
        TypeError: `init_optimizer` is not an optimizer, is wrapped already, or holds a parameter of
            a dtype that is not floating.
        ValueError: `clip` or a loss scale is out of range, or the inner optimizer cannot clip by a
            global norm.
    """

    # Old defaults of this module; apex_mp.optimizers.FP16_Optimizer has others.
    _ZERO_GRAD_SETS_NONE = False

    def __init__(
        self,
        init_optimizer: Any = None,
        static_loss_scale: float | LossScale = 1.0,
        dynamic_loss_scale: bool | LossScale | LossScaler | DynamicLossScaler = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        *,
        optimizer: Any = None,
        model: torch.nn.Module | None = None,
        clip: str = "group",
    ) -> None:
        # torch.optim.Optimizer.__init__ is not called: it would make param_groups of its own and
        # wrap step(), so that hooks meant for the inner optimizer would run twice.
        inner = inner_of(init_optimizer, optimizer, FP16_Optimizer)
        if clip not in ("group", "global"):
            raise ValueError(f'FP16_Optimizer: clip is {clip!r}; it must be "group" or "global"')
        self._legacy_arguments = legacy_arguments(inner)
        if clip == "global" and "grad_norms" not in self._legacy_arguments:
            raise ValueError(
                f'FP16_Optimizer: clip is "global", but {type(inner).__name__} does not clip by '
                "norms that it is given, as FusedAdam does by its max_grad_norm; "
                "use clip_master_grads"
            )
        self._loss_scaler, self._dynamic_args = new_scaler(
            static_loss_scale, dynamic_loss_scale, dynamic_loss_args, self._DYNAMIC_DEFAULTS
        )
        self._steps = DeviceSteps(self._told)
        self.optimizer = inner
        self.verbose = verbose
        self.clip = clip
        self.first_closure_call_this_step = True
        self.clip_grad_norm = torch.nn.utils.clip_grad_norm_
        self._log = step_log.StepLog(inner, "FP16_Optimizer")
        self._grads = MasterGrads(
            lazy=bool(self._legacy_arguments),
            dense=getattr(inner, "_writes_output_params", False),
            current_scale=self._scale_now,
        )
        self._masters = self._grads.masters
        self._names = ParamNames(self._grads, model)
        self._misuse = Misuse(self._grads)
        self._watch = StepWatch("FP16_Optimizer", self._masters)
        self._weights = WeightWatch(
            "FP16_Optimizer", self._masters, self._name_of, _ADVICE_FOR_WRITES
        )
        if self._loss_scaler in (static_loss_scale, dynamic_loss_scale):
            self._misuse.note_scale_is_known()  # The user has the scaler, and may read it.
        self._overflow: bool | None = False  # None: unknown since the last backward
        self._awaited: StepResult | None = None  # the last step, until its outcome is known
        self._group_norms: list[float] = []  # of the last step's unscaled gradients, if measured
        self._iteration = 0
        parallel_masters.add_scale(self, lambda optimizer: optimizer.loss_scaler, [self])
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        # Hooks of state_dict() and load_state_dict() run in the inner optimizer's.
        for name in _STATE_HOOKS:
            setattr(self, name, getattr(inner, name, OrderedDict()))
        for number, group in enumerate(inner.param_groups):
            self._check_new(number, group["params"], group.get("param_names"))
        dtypes = {param.dtype for group in inner.param_groups for param in group["params"]}
        if verbose and self.dynamic_loss_scale and dtypes & {*LOW_PRECISION} == {torch.bfloat16}:
            _LOG.warning(_SCALE_NOT_NEEDED)
        for group in inner.param_groups:
            self._adopt(group)
        self._weights.begin()

    def _check_new(self, number: int, params: list[Any], names: list[str] | None) -> None:
        self._masters.check_new(number, params, names or [*map(self._names.of_model, params)])

    def _adopt(self, group: dict[str, Any]) -> None:
        self._masters.add_group(group, self.state)
        if self.verbose:
            self._announce(len(self._masters.groups) - 1, self._masters.groups[-1])

    def _announce(self, index: int, group: MasterGroup) -> None:
        _LOG.info("FP16_Optimizer processing param group %d:", index)
        for param in [*group.model_params, *group.own_params]:
            _LOG.info("FP16_Optimizer received %s with %s", param.type(), param.size())

    # Parameters.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters; its low-precision ones get masters.

        Raises:
            TypeError: A parameter is of a dtype that is not floating.
            ValueError: A parameter is in a group already.
        """
        if isinstance(param_group, dict):  # torch says so otherwise
            param_group = dict(param_group)
        self._check_new(len(self.param_groups), *tensors.listed(param_group))
        self.optimizer.add_param_group(param_group)
        self._adopt_new()

    def _adopt_new(self) -> None:
        """Make masters for what came to require grad, and for groups that came to the inner one."""
        self._masters.adopt_unfrozen(self.param_groups, self.state)
        for group in self.param_groups[len(self._masters.groups) :]:
            self._adopt(group)

    def _name_of(self, master: Parameter) -> str:
        return self._names.of(master, self.param_groups)

    # Gradients.

    @_eager
    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward on the scaled loss; gradients add up over several calls, as in torch.

        Args:
            loss: The loss, a scalar on the graph. It may be NaN or inf: only gradients decide.
            update_master_grads: Unscale the gradients now. With False call `update_master_grads()`
                after the last of several backward calls, or leave that to `step` [True].
            retain_graph: As in `Tensor.backward` [False].

        Raises:
            TypeError: `loss` is no floating tensor.
        """
        check_loss(loss)
        device_scale.settle(wait=False)
        self._adopt_new()
        scale = self._scale_now()
        self._grads.begin_backward(scale, self._steps.last_scale)
        self._forget_overflow()
        wide = loss if loss.dtype == torch.float64 else loss.float()
        if isinstance(scale, Tensor):
            scale = device_scale.bring(scale, wide.device)
        try:
            torch.autograd.backward(wide * scale, retain_graph=retain_graph)
        except BaseException:
            self._grads.abandon_backward()
            raise
        self._grads.end_backward()
        self._misuse.note_backward()
        if update_master_grads:
            self.update_master_grads()

    def _scale_now(self) -> float | Tensor:
        """The factor on the loss: a tensor if it is on a device that the host does not wait for."""
        device = self._device_to_leave_alone()
        if device is None:
            return self._scaler_now().cur_scale
        return self._steps.scale(self._loss_scaler, device)

    def _device_to_leave_alone(self) -> torch.device | None:
        """The device that steps need not be waited for on, if there is one."""
        scaler = self._loss_scaler
        if type(scaler) not in (LossScaler, DynamicLossScaler) or "update_scale" in vars(scaler):
            return None  # Its update_scale is to be called after each step.
        params = (param for group in self.param_groups for param in group["params"])
        first = next(params, None)
        if first is None or first.device.type not in device_scale.DEVICE_TYPES:
            return None
        return first.device if self._can_step_fused() else None

    @_eager
    def update_master_grads(self) -> None:
        """Unscale what backward has accumulated, so that `.grad` in param_groups can be read.

        Edits of masters' gradients made before are lost.
        """
        self._adopt_new()
        self._misuse.check_source(self._loss_scaler.cur_scale)
        self._forget_overflow()
        self._overflow = self._grads.unscale()

    @_eager
    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool | None = None, *, set_to_none: bool | None = None
    ) -> None:
        """Clear the gradients of the model's parameters and of the masters.

        Args:
            set_grads_to_None: Set them to None instead of zero. The old name.
            set_to_none: The same, by torch's name. Without either the old default of the module
                holds: False in fp16_utils, True in optimizers.
        """
        self._adopt_new()
        wish = set_to_none if set_to_none is not None else set_grads_to_None
        self._grads.zero(to_none=self._ZERO_GRAD_SETS_NONE if wish is None else wish)

    @_eager
    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients of all groups together by their norm.

        Returns:
            Their norm before clipping, or -1 if they hold inf or NaN; then nothing is clipped.
        """
        self._unscale_what_came_in()
        if self.overflow:
            return -1
        params = [param for group in self.param_groups for param in group["params"]]
        norm = self.clip_grad_norm(params, max_norm, norm_type)
        if norm_type == 2 and step_log.heard(self):
            factor = step_log.clip_factor(float(norm), max_norm)
            step_log.measured(self, grad_norm=float(norm), clip=factor)
        self._grads.accept_edits()
        return norm

    @_eager
    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the unscaled gradients, a list for each group, None where there is none.

        After an overflow they are worth nothing: None is returned, and a warning is logged.
        """
        self._unscale_what_came_in()
        if self.overflow:
            if self.verbose:
                _LOG.warning(_STALE_GRADS)
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    @property
    @_eager
    def overflow(self) -> bool:
        """Whether the present gradients hold inf or NaN; after `step`, whether it was skipped.

        On a GPU the host waits for it.
        """
        if self._overflow is None:
            device_scale.settle(wait=True)
        if self._overflow is None and self._grads.stage is Stage.STEPPED:
            captured = self._steps.captured_overflow()
            if captured is not None:
                return captured  # Until the next replay.
        if self._overflow is None:
            lists, scale = self._grads.collect(self.param_groups)
            found = _check(lists)
            self._overflow = bool(found)
            self._group_norms = _unscaled(found, scale)
        return self._overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._forget_overflow()
        self._overflow = bool(value)

    @property
    def overflow_report(self) -> list[grads.NonFinite]:
        """For the last skipped step, which gradients held how many inf and NaN, the worst first.

        On a GPU the host waits for it. If the gradients were cleared before it is read, there are
        no counts, and only the first eight parameters are named; none if parameters lie on several
        devices.
        """
        device_scale.settle(wait=True)
        return [*self._log.report]

    def _forget_overflow(self) -> None:
        self._overflow = None
        self._awaited = None

    def _unscale_what_came_in(self) -> None:
        """Unscale gradients of our backward or another, unless they are unscaled already."""
        if self._grads.came_in() or self._misuse.edits_count():
            self.update_master_grads()
        elif self._grads.stage is Stage.READY:
            self._forget_overflow()  # There are no gradients: the last step's overflow is over.

    # The step.

    @_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and write them to the model, or skip if a gradient is inf or NaN.

        Args:
            closure: Clears the gradients, computes the loss, calls `self.backward` and returns the
                loss; for optimizers such as LBFGS. While it overflows the loss scale backs off
                and it is called again; with an inner optimizer of the legacy call, which needs it
                once, the step is skipped.

        Returns:
            What the inner optimizer's step returned; None if the step was skipped.
        """
        device_scale.settle(wait=False)
        self._adopt_new()
        self._weights.before_step()
        loss = None
        if closure is not None and self._legacy_arguments:
            with torch.enable_grad():
                loss, closure = closure(), None
        skipped: bool | None
        if closure is not None:
            skipped, value = self._step_with_closure(closure)
        else:
            self._misuse.check_clip()
            self._unscale_what_came_in()
            with self._announced():
                skipped, value = self._step_without_closure()
        self._end_step(skipped=skipped)
        self._weights.begin()
        if loss is None or value is not None:
            return value
        return None if self.overflow else loss

    def _announced(self) -> AbstractContextManager[None]:
        if not step_log.listeners:
            return contextlib.nullcontext()
        scale = self._grads.scale_of_grads()
        return step_log.announced(self, scale=scale, unscaled=(torch.float32, torch.float64))

    def _step_without_closure(self) -> tuple[bool | None, Any]:
        """Step; return whether it was skipped, if that is known, and the inner one's value."""
        if not self._legacy_arguments:
            return self._step_plain()
        return (self._step_fused(), None) if self._can_step_fused() else self._step_legacy()

    def _can_step_fused(self) -> bool:
        # A hook runs once for each step that is taken: an overflow must be known before it.
        return getattr(self.optimizer.step, "takes_request", False) and not (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or self.optimizer._optimizer_step_pre_hooks
            or self.optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )

    def _step_fused(self) -> bool | None:
        """Step a fused optimizer, which looks for inf and NaN; return whether it was skipped."""
        grads_of, copies, scale = self._grads.sources(self.param_groups)
        device = self._device_to_leave_alone()
        request = StepRequest(
            grads_of=grads_of,
            copies=copies,
            check=True,
            clip_by_global_norm=self.clip == "global",
            loss_scale=None if device is None else self._steps.for_step(self._loss_scaler, device),
            wait=device is None,
        )
        result = checked_result(self.optimizer.step(grads=request, scale=scale), self.optimizer)
        outcome = result.outcome
        if not outcome.found_inf:
            # The user may have written to masters that have no gradient.
            self._grads.copy_to_model_of(result.without_grad)
        if outcome.is_known:
            self._group_norms = outcome.norms
            return outcome.found_inf
        self._awaited = result
        return None

    def _step_plain(self) -> tuple[bool, Any]:
        """Step an inner optimizer that reads `.grad`; return whether it was skipped, its value."""
        if self._overflow_now():
            return True, None
        self._call_hooks(self._optimizer_step_pre_hooks)
        if self._optimizer_step_pre_hooks:
            self._unscale_what_came_in()  # A hook may edit gradients.
            if self._overflow_now():
                return True, None
        self._watch.before_step()
        value = self.optimizer.step()
        self._watch.after_step(self.optimizer)
        self._call_hooks(self._optimizer_step_post_hooks)
        return False, value

    def _overflow_now(self) -> bool:
        self._overflow = None  # An edit, by way of .data too, may have brought in inf or NaN.
        return self.overflow

    def _step_legacy(self) -> tuple[bool, Any]:
        """Step an inner optimizer that takes scaled gradients; return as _step_plain."""
        lists, scale = self._grads.collect(self.param_groups)
        found = _check(lists)
        if found:
            return True, None
        if self._optimizer_step_pre_hooks:
            self._call_hooks(self._optimizer_step_pre_hooks)
            lists, scale = self._grads.collect(self.param_groups)  # A hook may edit gradients.
            found = _check(lists)
            if found:
                return True, None
        self._group_norms = _unscaled(found, scale)
        norms = found.norms
        if self.clip == "global":
            norms = [math.hypot(*norms)] * len(norms)
        models = self._grads.slots(self.param_groups).models
        arguments = {
            "grads": lists,
            "output_params": models,
            "scale": float(scale),
            "grad_norms": norms,
        }
        value = self.optimizer.step(**{name: arguments[name] for name in self._legacy_arguments})
        self._masters.copy_to_model(except_for=self._written(lists))
        self._call_hooks(self._optimizer_step_post_hooks)
        return False, value

    def _written(self, lists: list[list[Tensor | None]]) -> set[int]:
        """Ids of the model parameters that the inner optimizer's step has written itself."""
        if not getattr(self.optimizer, "_writes_output_params", False):
            return set()
        return {
            id(model)
            for one, models in zip(lists, self._grads.slots(self.param_groups).models, strict=True)
            for grad, model in zip(one, models, strict=True)
            if grad is not None
        }

    def _call_hooks(self, hooks: OrderedDict[int, Any]) -> None:
        for hook in hooks.values():
            hook(self, (), {})

    def _end_step(self, *, skipped: bool | None) -> None:
        if skipped is not None:
            device_scale.settle(wait=True)  # The steps before this one come first.
        self._overflow = skipped
        found = self._locate() if skipped else []  # While masters still have gradients.
        self._grads.end_step()
        if skipped is None:
            assert self._awaited is not None  # The step has left it there.
            # From here on _told may be called.
            self._steps.send(self._awaited, verbose=self.verbose)
            return
        self._awaited = None
        norms, self._group_norms = self._group_norms, []
        self._take_note(skipped, self._loss_scaler.update_scale, lambda: found, norms)

    def _told(self, outcome: Outcome, result: StepResult) -> None:
        """Handle the result of a step that completed asynchronously."""

        def locate() -> list[grads.NonFinite]:
            if is_last and self._grads.stage is Stage.STEPPED and not self._grads.came_in():
                return self._locate()
            return self._names.rows(outcome.nonfinite_rows, result.without_grad, self.param_groups)

        is_last = result is self._awaited
        if is_last:
            self._overflow = outcome.found_inf
            self._awaited = None
        if outcome.found_inf and result.undo_state is not None:
            result.undo_state()
        self._take_note(
            outcome.found_inf,
            lambda skipped: self._steps.update(self._loss_scaler, skipped=skipped),
            locate,
            outcome.norms,
        )

    def _take_note(
        self,
        skipped: bool,
        update_scale: Callable[[bool], None],
        locate: Callable[[], list[grads.NonFinite]],
        norms: list[float],
    ) -> None:
        """Bring scaler and counts up to date, and say what was skipped."""
        scaler = self._loss_scaler
        scale = scaler.cur_scale
        iteration = scaler.cur_iter if isinstance(scaler, DynamicLossScaler) else self._iteration
        update_scale(skipped)
        self._iteration += 1
        report = locate() if skipped else []
        if skipped:
            self._weights.check_range()
            if self.verbose:
                overflow = Overflow(report, scale, scaler.cur_scale)
                overflow.log(_LOG, self._skip_message(iteration, scale))
        self._log.end(
            skipped,
            report,
            scale=lambda: self._scaler_now().cur_scale,
            owners=[self],
            note=lambda: self._note(skipped, scale, norms),
        )

    def _note(self, skipped: bool, scale: float, norms: list[float]) -> step_log.StepNote:
        value = self._loss_scaler.loss_scale_value
        is_clipped = "grad_norms" in self._legacy_arguments
        always_global = getattr(self.optimizer, "_clips_by_global_norm", False)  # as FusedLAMB
        norm, clip = step_log.norm_and_clip(
            norms,
            self.param_groups if is_clipped else [{}] * len(norms),
            by_global_norm=always_global or self.clip == "global",
        )
        return step_log.StepNote(
            skipped,
            scale,
            lowest=value.min_scale if isinstance(value, DynamicLossScale) else None,
            grad_norm=norm,
            clip=clip,
            overflow=self._log.report if skipped else (),
        )

    def _locate(self) -> list[grads.NonFinite]:
        return grads.locate_nonfinite(self._names.grads(self.param_groups))

    def _skip_message(self, iteration: int, scale: float) -> str:
        message = f"OVERFLOW! Skipping step. Attempted loss scale: {scale}"
        if not self.dynamic_loss_scale:
            return message
        return f"{message}, reducing to {self._scaler_now().cur_scale}"

    def _step_with_closure(self, closure: Callable[[], Any]) -> tuple[bool, Any]:
        """Step an inner optimizer that calls a closure as often as it likes; as _step_plain."""
        params = [param for group in self.param_groups for param in group["params"]]
        before = Snapshot(params, self.state)
        self.first_closure_call_this_step = True
        self._call_hooks(self._optimizer_step_pre_hooks)
        try:
            value = self.optimizer.step(lambda: self._evaluate(closure))
        except StepAbandonedError:
            before.restore(self.state)
            self._masters.copy_to_model()
            return True, None
        self._masters.copy_to_model()
        self._call_hooks(self._optimizer_step_post_hooks)
        return False, value

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not self.first_closure_call_this_step:
            self._masters.copy_to_model()  # A line search has moved the masters.
        self.first_closure_call_this_step = False
        return evaluate(closure, self._overflowed, self._back_off)

    def _overflowed(self) -> bool:
        self._misuse.check_clip()
        self._unscale_what_came_in()
        return self.overflow

    def _back_off(self) -> bool:
        scaler = self._scaler_now()
        scale = scaler.cur_scale
        if scaler.loss_scale_value.update(True).scale >= scale:
            return False
        scaler.update_scale(True)
        if self.verbose:
            _LOG.warning(
                "OVERFLOW within closure! Skipping step. Attempted loss scale: %s, reducing to %s",
                scale,
                scaler.cur_scale,
                extra={"overflow": Overflow(self._locate(), scale, scaler.cur_scale)},
            )
        return True

    # Checkpoints.

    @with_checkpoint_view
    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as tensors and plain values.

        `torch.load(..., weights_only=True)` reads it. Masters are copied. Keys: `loss_scaler`,
        `dynamic_loss_scale`, `cur_iter`, `overflow`, `first_closure_call_this_step`,
        `optimizer_state_dict`, `fp32_from_fp16` (masters, a list for each group).
        """
        return {
            **self._scale_state(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": _checkpoint.masters(self._masters.groups),
        }

    def _scale_state(self) -> dict[str, Any]:
        return {
            "loss_scaler": self._scaler_now().state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_iter": self.cur_iter,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
        }

    def _checkpoint_view(self) -> CheckpointView:
        return CheckpointView(
            self.optimizer,
            self._load_view,
            self._masters.model_of,
            self._scale_state(),
            saves_masters=True,
        )

    def _load_view(
        self, inner: dict[str, Any], masters: list[list[Any]], scale: dict[str, Any]
    ) -> None:
        self.load_state_dict(
            _checkpoint.joined(inner, masters, scale, self.param_groups, self._masters.model_of)
        )

    @with_checkpoint_view
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of any era, and write its masters to the model.

        Read are: what `state_dict` returned, here or in `apex_mp.optimizers`, and in apex of 2018
        to 2020, whose loss scaler is an object; the state of an optimizer of the same parameters
        that was not wrapped, such as torch.optim.Adam (the loss scale stays, and masters follow
        the model where it was changed); and the state of a GradScaler, of which the loss scale is
        taken and nothing else. `docs/checkpoints.md` lists the keys.

        Raises:
            TypeError, ValueError: A key is missing, or masters, state or numbers do not fit; the
                message names group and index, and nothing is changed then.
        """
        state_dict = as_dict("FP16_Optimizer", state_dict)
        if is_of_grad_scaler(state_dict):
            self._set_scaler(whole_scaler(state_dict) or self._scaler_now())
            return
        loaded = _checkpoint.read(
            state_dict,
            self.optimizer,
            self._masters.groups,
            self._scaler_now(),
            iteration=self._iteration,
            dynamic_args=self._dynamic_args,
        )
        _inner_state.load(self.optimizer, loaded.inner)
        self._set_scaler(loaded.loss_scaler)
        self._iteration = loaded.iteration
        self.overflow = loaded.overflow
        self.first_closure_call_this_step = loaded.first_closure_call_this_step
        with torch.no_grad():
            for master, saved in loaded.masters:
                master.copy_(saved)
        self._masters.copy_to_model()
        self._weights.begin()


def _check(lists: list[list[Tensor | None]]) -> FoundInf:
    """Check the gradients of each group, and sum its squares."""
    found = FoundInf()
    rows = [(grad, row) for row, one in enumerate(lists) for grad in one if grad is not None]
    found.check([grad for grad, _ in rows], [row for _, row in rows], len(lists))
    return found


def _unscaled(found: FoundInf, scale: float | Tensor) -> list[float]:
    """Return the norms of unscaled gradients; the host has just waited for their device."""
    return [norm / float(scale) for norm in found.norms]
