"""FP16_Optimizer: scaled loss, fp32 masters and skipped overflows around any optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core import readback, tensors
from apex_mp.core.log import see
from apex_mp.core.state_checks import as_dict
from apex_mp.core.tensors import params_of
from apex_mp.fp16_utils import _stepping
from apex_mp.fp16_utils._misuse import Misuse, check_loss, inner_of, legacy_arguments
from apex_mp.fp16_utils._stepping import LOG, check_groups, end_step
from apex_mp.grads.found_inf import clip_factor
from apex_mp.grads.in_host_memory import refuse_offloaded
from apex_mp.grads.nonfinite import NonFinite, locate_nonfinite
from apex_mp.loss_scale import LossScale, StaticLossScale, is_of_grad_scaler
from apex_mp.masters import parallel_masters
from apex_mp.masters.master_grads import MasterGrads, Stage
from apex_mp.masters.masters import LOW_PRECISION, MasterGroup
from apex_mp.masters.param_names import ParamNames
from apex_mp.masters.steps_of_masters import StepWatch
from apex_mp.masters.weight_watch import WeightWatch
from apex_mp.saved import fp16_optimizer as _saved
from apex_mp.saved import inner_state
from apex_mp.saved.dcp import CheckpointView, with_checkpoint_view
from apex_mp.scale import device_scale
from apex_mp.scale.fp16_scalers import (
    DynamicLossScaler,
    LossScaler,
    ScaleOnDevice,
    is_true,
    new_scaler,
    scaler_of,
)
from apex_mp.step import step_log
from apex_mp.step.delegating import DelegatingOptimizer
from apex_mp.step.record import StepRecord
from apex_mp.step.scaled_step import StepResult

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


eager = torch._disable_dynamo  # type: ignore[attr-defined]  # As torch's own optimizers.


def _of_dynamic(name: str, doc: str) -> Any:
    """Return a property that is an attribute of the dynamic loss scaler."""

    def get(self: FP16_Optimizer) -> Any:
        return getattr(self._dynamic(name), name)

    def put(self: FP16_Optimizer, value: Any) -> None:
        setattr(self._dynamic(name), name, value)

    return property(get, put, doc=doc)


def _of_groups(name: str, doc: str) -> Any:
    """Return a property that lists an attribute of each group of masters."""
    return property(lambda self: [getattr(group, name) for group in self._masters.groups], doc=doc)


def _of_masters(name: str, doc: str) -> Any:
    """Return a property that lists parameters of all groups of masters."""
    return property(lambda self: getattr(self._masters, name)(), doc=doc)


class FP16_Optimizer(DelegatingOptimizer):
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
    _DYNAMIC_DEFAULTS: Mapping[str, Any] = {}

    _inner_name = "optimizer"
    optimizer: Any
    # The arguments of the legacy call that the inner optimizer's step takes.
    _legacy_arguments: tuple[str, ...]
    _loss_scaler: LossScaler | DynamicLossScaler
    _dynamic_args: dict[str, Any]
    _optimizer_step_pre_hooks: OrderedDict[int, Any]
    _optimizer_step_post_hooks: OrderedDict[int, Any]

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
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )
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
        self._masters.add_group(group, self.optimizer.state)
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
        self._check_new(len(self.optimizer.param_groups), *tensors.listed(param_group))
        self.optimizer.add_param_group(param_group)
        self._adopt_new()

    def _adopt_new(self) -> None:
        """Make masters for parameters that require grad now, and for the inner one's new groups."""
        self._masters.adopt_unfrozen(self.optimizer.param_groups, self.optimizer.state)
        for group in self.optimizer.param_groups[len(self._masters.groups) :]:
            self._adopt(group)

    def _name_of(self, master: Parameter) -> str:
        return self._names.of(master, self.optimizer.param_groups)

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
        norm = self.clip_grad_norm(params_of(self.optimizer), max_norm, norm_type)
        if norm_type == 2 and step_log.heard(self):
            clip = clip_factor(float(norm), max_norm)
            step_log.measured(self, grad_norm=float(norm), clip=clip)
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
            for group in self.optimizer.param_groups
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
            skipped, value = _stepping.step_with_closure(self, closure)
        else:
            self._misuse.check_clip()
            self._misuse.refuse_used()
            self._unscale_what_came_in()
            with _stepping.announced(self):
                skipped, value = _stepping.step_without_closure(self)
        end_step(self, skipped=skipped)
        self._weights.begin()
        if loss is None or value is not None:
            return value
        return None if self.overflow else loss

    def _scale_now(self) -> float | Tensor:
        """Return the factor on the loss: a tensor if the host does not wait for its device."""
        device = self._device_to_leave_alone()
        if device is None:
            return self._scaler_now().cur_scale
        return self._device_scale.scale(self._loss_scaler, device)

    def _device_to_leave_alone(self) -> torch.device | None:
        """Return the device on which the host need not wait for steps, or None."""
        scaler = self._loss_scaler
        if type(scaler) not in (LossScaler, DynamicLossScaler) or "update_scale" in vars(scaler):
            return None  # Its update_scale is to be called after each step.
        for group in self.optimizer.param_groups:
            if group["params"]:
                device: torch.device = group["params"][0].device
                break
        else:
            return None
        if device.type not in device_scale.DEVICE_TYPES:
            return None
        return device if _stepping.can_step_fused(self) else None

    def _unscale_what_came_in(self) -> None:
        """Unscale new gradients, whichever backward made them, unless they are unscaled already."""
        if self._grads.has_new_grads() or self._misuse.edits_count():
            self.update_master_grads()
        elif self._grads.stage is Stage.READY:
            self._forget_overflow()  # There are no gradients: the last step's overflow is over.

    # Outcomes.

    @property
    @eager
    def overflow(self) -> bool:
        """Whether the present gradients hold inf or NaN; after `step`, whether it was skipped.

        On a GPU the host waits for it.
        """
        if self._overflow is None:
            readback.wait()
        is_stepped = self._overflow is None and self._grads.stage is Stage.STEPPED
        if is_stepped and self._record.captured is not None:
            return self._record.was_skipped  # Until the next replay.
        if self._overflow is None:
            lists, scale = self._grads.collect(self.optimizer.param_groups)
            found, norms = check_groups(lists)
            self._overflow = bool(found)
            self._group_norms = [norm / float(scale) for norm in norms]
        return self._overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._forget_overflow()
        self._overflow = bool(value)

    @property
    def overflow_report(self) -> list[NonFinite]:
        """For the last skipped step, which gradients held how many inf and NaN, the worst first.

        On a GPU the host waits for it. If the gradients were cleared before it is read, there are
        no counts, and only the first eight parameters are named; none if parameters lie on several
        devices.
        """
        readback.wait()
        return [*self._record.report]

    def _forget_overflow(self) -> None:
        self._overflow = None
        self._awaited = None

    def _locate(self) -> list[NonFinite]:
        return locate_nonfinite(self._names.grads(self.optimizer.param_groups))

    def _skip_message(self, iteration: int, scale: float) -> str:
        message = f"OVERFLOW! Skipping step. Attempted loss scale: {scale}"
        if not self.dynamic_loss_scale:
            return message
        return f"{message}, reducing to {self._scaler_now().cur_scale}"

    # The loss scale.

    def __repr__(self) -> str:
        inner, kind = self.optimizer, "dynamic" if self.dynamic_loss_scale else "static"
        scale = f"{kind} loss scale {self._scaler_now().cur_scale}"
        return f"{type(self).__name__} with the {scale} around {inner!r}"

    @property
    def loss_scaler(self) -> LossScaler | DynamicLossScaler:
        """The present loss scaler, for which the host waits for a GPU; may be set."""
        self._misuse.note_scale_is_known()
        return self._scaler_now()

    @loss_scaler.setter
    def loss_scaler(self, value: Any) -> None:
        self._misuse.note_scale_is_known()
        self._set_scaler(scaler_of(value) or value)

    def _scaler_now(self) -> LossScaler | DynamicLossScaler:
        """Return the up-to-date loss scaler; does not count as a read by the user."""
        self._device_scale.catch_up(self._loss_scaler)
        return self._loss_scaler

    def _set_scaler(self, value: LossScaler | DynamicLossScaler) -> None:
        # Outcomes of earlier steps are for the old one.
        self._device_scale.catch_up(self._loss_scaler)
        self._loss_scaler = value

    @property
    def loss_scale(self) -> float:
        """The factor on the loss; may be set."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        scaler = self.loss_scaler
        scaler.cur_scale = StaticLossScale(value).scale  # Refuses what is no scale.
        self._device_scale.write_through(scaler)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic; may be set."""
        return isinstance(self._loss_scaler, DynamicLossScaler)

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, value: Any) -> None:
        scaler = scaler_of(value)
        if scaler is not None:
            self.loss_scaler = scaler
        elif (dynamic := is_true("dynamic_loss_scale", value)) != self.dynamic_loss_scale:
            self.loss_scaler = self._new_loss_scaler(dynamic, self.loss_scale)

    def _new_loss_scaler(self, dynamic: bool, scale: float) -> LossScaler | DynamicLossScaler:
        if not dynamic:
            return LossScaler(scale)
        return DynamicLossScaler(**{**self._dynamic_args, "init_scale": scale})

    @property
    def cur_iter(self) -> int:
        """Steps until now, skipped ones included; may be set."""
        scaler = self._scaler_now()
        return scaler.cur_iter if isinstance(scaler, DynamicLossScaler) else self._iteration

    @cur_iter.setter
    def cur_iter(self, value: int) -> None:
        scaler = self._scaler_now()
        self._iteration = value
        if isinstance(scaler, DynamicLossScaler):
            scaler.cur_iter = value

    def _dynamic(self, name: str) -> DynamicLossScaler:
        scaler = self._scaler_now()
        if not isinstance(scaler, DynamicLossScaler):
            raise AttributeError(f"FP16_Optimizer has {name} only if dynamic_loss_scale is True")
        return scaler

    last_overflow_iter = _of_dynamic(
        "last_overflow_iter",
        "The last skipped step; may be set. Only with a dynamic loss scale, like the next two.",
    )
    scale_factor = _of_dynamic(
        "scale_factor", "Growth multiplies the loss scale by this, backing off divides; may be set."
    )
    scale_window = _of_dynamic(
        "scale_window", "Steps without overflow before the loss scale grows; may be set."
    )

    # Old names of parameters and masters.

    fp16_groups = _of_groups("model_params", "The model's low-precision parameters, by group.")
    fp32_from_fp16_groups = _of_groups(
        "master_params", "The masters of the low-precision parameters, by group."
    )
    fp32_from_fp32_groups = _of_groups(
        "fp32_params", "The parameters of float32 and float64, by group."
    )
    fp32_groups_flat = _of_groups(
        "flat", "Each group's masters as one vector; what is written to it counts in the next step."
    )
    all_fp16_params = _of_masters("model_params", "The model's low-precision parameters.")
    all_fp32_from_fp16_params = _of_masters(
        "master_params", "The masters of the low-precision parameters."
    )
    all_fp32_from_fp32_params = _of_masters("fp32_params", "The parameters of float32 and float64.")

    @property
    def fp16_groups_flat(self) -> list[Tensor]:
        """A copy of each group's low-precision parameters as one vector."""
        return [
            torch.cat([param.detach().reshape(-1) for param in group.model_params])
            if group.model_params
            else torch.empty(0, dtype=torch.float16)
            for group in self._masters.groups
        ]

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
            "fp32_from_fp16": _saved.masters(self._masters.groups),
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
            _saved.joined(
                inner, masters, scale, self.optimizer.param_groups, self._masters.model_of
            )
        )

    @with_checkpoint_view
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of any era, and write its masters to the model.

        It reads the state_dict of either FP16_Optimizer of this package; that of apex of 2018 to
        2020, whose loss scaler is an object; that of an optimizer of the same parameters that was
        not wrapped, such as torch.optim.Adam (the loss scale stays, and masters follow the model
        where it was changed); and that of a GradScaler, which sets only the loss scale.
        `docs/checkpoints.md` lists the keys.

        Raises:
            TypeError, ValueError: A key is missing, or masters, state or numbers do not fit; the
                message names group and index, and nothing is changed then.
        """
        state_dict = as_dict("FP16_Optimizer", state_dict)
        if is_of_grad_scaler(state_dict):
            self._set_scaler(_saved.whole_scaler(state_dict) or self._scaler_now())
            return
        loaded = _saved.read(
            state_dict,
            self.optimizer,
            self._masters.groups,
            self._scaler_now(),
            iteration=self._iteration,
            dynamic_args=self._dynamic_args,
        )
        inner_state.load(self.optimizer, loaded.inner)
        self._set_scaler(loaded.loss_scaler)
        self._iteration = loaded.iteration
        self.overflow = loaded.overflow
        self.first_closure_call_this_step = loaded.first_closure_call_this_step
        with torch.no_grad():
            for master, saved in loaded.masters:
                master.copy_(saved)
        self._masters.copy_to_model()
        self._weights.begin()

    # Of torch's optimizers.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "FP16_Optimizer was given to a GradScaler, but scales the loss itself; use "
            "optimizer.backward(loss) and optimizer.step() without GradScaler, or GradScaler with "
            "the inner optimizer alone"
        )

    def refresh_hyperparameters(self) -> None:
        """Make a captured CUDA graph's step use the present options, as `FusedAdam` does."""
        self.optimizer.refresh_hyperparameters()

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")
