"""FP16_Optimizer: scaled loss, fp32 masters and skipped overflows around any optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core import tensors
from apex_mp.core.grads.marks import refuse_offloaded
from apex_mp.core.log import see
from apex_mp.core.masters import parallel_masters
from apex_mp.core.masters.master_grads import MasterGrads
from apex_mp.core.masters.masters import LOW_PRECISION, MasterGroup
from apex_mp.core.masters.weight_watch import WeightWatch
from apex_mp.core.step import readback, step_log
from apex_mp.core.step.inner import (
    StepWatch,
    check_loss,
    inner_of,
    legacy_arguments,
)
from apex_mp.core.step.record import StepRecord
from apex_mp.core.step.scaled_step import StepResult
from apex_mp.core.step.skips import ParamNames
from apex_mp.fp16_utils._given_scale import new_scaler
from apex_mp.fp16_utils._misuse import Misuse
from apex_mp.fp16_utils._parts import LOG, eager
from apex_mp.fp16_utils._saving import Checkpoints
from apex_mp.fp16_utils._scale_on_device import ScaleOnDevice
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import LossScale

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


class FP16_Optimizer(Checkpoints):
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
        refuse_offloaded("FP16_Optimizer", inner)
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
        self._device_scale = ScaleOnDevice()
        self.optimizer = inner
        self.verbose = verbose
        self.clip = clip
        self.first_closure_call_this_step = True
        self.clip_grad_norm = torch.nn.utils.clip_grad_norm_
        self._record = StepRecord(inner, "FP16_Optimizer")
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
            LOG.warning(_SCALE_NOT_NEEDED + see("arguments-without-effect"))
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
        LOG.info("FP16_Optimizer processing param group %d:", index)
        for param in [*group.model_params, *group.fp32_params]:
            LOG.info("FP16_Optimizer received %s with %s", param.type(), param.size())

    # Parameters.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters; its low-precision ones get masters.

        Args:
            param_group: `params` and options, as for any optimizer of torch.

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
        """Make masters for parameters that require grad now, and for the inner one's new groups."""
        self._masters.adopt_unfrozen(self.param_groups, self.state)
        for group in self.param_groups[len(self._masters.groups) :]:
            self._adopt(group)

    def _name_of(self, master: Parameter) -> str:
        return self._names.of(master, self.param_groups)

    # Gradients.

    @eager
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
        readback.poll()
        self._adopt_new()
        scale = self._scale_now()
        self._grads.begin_backward(scale, self._device_scale.last_scale)
        self._forget_overflow()
        wide = loss if loss.dtype == torch.float64 else loss.float()
        if isinstance(scale, Tensor):
            scale = tensors.copy_async(scale, wide.device)
        try:
            torch.autograd.backward(wide * scale, retain_graph=retain_graph)
        except BaseException:
            self._grads.abandon_backward()
            raise
        self._grads.end_backward()
        self._misuse.note_backward()
        if update_master_grads:
            self.update_master_grads()

    @eager
    def update_master_grads(self) -> None:
        """Unscale the accumulated gradients, so that `.grad` in param_groups can be read.

        Earlier edits of masters' gradients are lost.
        """
        self._adopt_new()
        self._misuse.check_source(self._loss_scaler.cur_scale)
        self._forget_overflow()
        self._overflow = self._grads.unscale()

    @eager
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

    @eager
    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients of all groups together by their norm.

        Args:
            max_norm: The largest norm afterwards.
            norm_type: The p of the p-norm; `inf` for the largest element [2].

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

    @eager
    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the unscaled gradients, a list for each group, None where there is none.

        After an overflow they mean nothing: None is returned, and a warning is logged.
        """
        self._unscale_what_came_in()
        if self.overflow:
            if self.verbose:
                LOG.warning(_STALE_GRADS)
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    # The step.

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and write them to the model, or skip if a gradient is inf or NaN.

        Args:
            closure: Clears the gradients, computes the loss, calls `self.backward` and returns the
                loss; for optimizers such as LBFGS. While it overflows the loss scale backs off
                and it is called again; with an inner optimizer of the legacy call, which needs it
                once, the step is skipped.

        Returns:
            What the inner optimizer's step returned; None if the step was skipped.

        Raises:
            RuntimeError: The last step has used the gradients of float32 parameters already.
        """
        readback.poll()
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
            self._misuse.refuse_used()
            self._unscale_what_came_in()
            with self._announced():
                skipped, value = self._step_without_closure()
        self._end_step(skipped=skipped)
        self._weights.begin()
        if loss is None or value is not None:
            return value
        return None if self.overflow else loss
