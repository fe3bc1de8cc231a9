"""FP16_Optimizer: scaled loss, fp32 masters and skipped overflows around any optimizer."""

from __future__ import annotations

import copy
import enum
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import grads as _grads
from apex_mp.fp16_utils import _checkpoint
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.master import MasterGroup, rekey_state, store_grad, stored_grad

_SKIPS_BEFORE_WARNING = 50
_PARAMETERS_NAMED = 3


class _Stage(enum.Enum):
    """What the `.grad` of parameters that are their own masters (fp32) holds now."""

    READY = "nothing of ours: zero_grad() or step() came last"
    SCALED = "scaled gradients, of backward(update_master_grads=False)"
    UNSCALED = "unscaled gradients"


class _StepAbandoned(Exception):
    """Raised through an inner optimizer whose closure overflows at any scale."""


class FP16_Optimizer(torch.optim.Optimizer):
    """Train float16 (or bfloat16) parameters with any optimizer, on fp32 masters.

    Wrapping puts an fp32 master in place of every low-precision parameter that requires grad, into
    the inner optimizer's own parameter lists. Then

        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        ...
        optimizer.zero_grad()
        optimizer.backward(loss)        # instead of loss.backward()
        optimizer.step()

    scales the loss, unscales the gradients, steps the masters and writes them, rounded, to the model.
    A step whose gradients hold inf or NaN is skipped, with a static loss scale too: nothing changes
    but the scale, and a message says which parameters hold them. Parameters of float32 may be mixed
    in; they are their own masters.

    Several `backward` calls before a `step` accumulate. `param_groups` holds the masters: their `.grad`
    is the unscaled gradient, and editing it (`clip_grad_norm_`) counts; on parameters of float32 too.
    An inner optimizer whose `step` takes `grads`, `output_params` and `scale`, such as FusedAdam, is
    given the scaled gradients themselves, so that unscaling, clipping by its `max_grad_norm` and the
    copy to the model cost no pass of their own.

    Learning-rate schedulers take this object or the inner optimizer, also from before wrapping.

    Args:
        init_optimizer: Optimizer of the model's parameters. Also as `optimizer=`.
        static_loss_scale: Factor on the loss [1].
        dynamic_loss_scale: Adjust the factor to the gradients; overrides the static one [False].
        dynamic_loss_args: Arguments of `DynamicLossScaler`, for example `{"init_scale": 2**16}`;
            `init_scale` is 2**32 otherwise [None].
        verbose: Print which parameters are wrapped, and why steps are skipped [True].
        optimizer: The same as `init_optimizer`.
        model: The module whose names an overflow message uses for its parameters; without it the
            message names group, index and shape [None].
        clip: For an inner optimizer with `max_grad_norm`: "group" clips each group by its own norm,
            "global" each by the norm over all groups ["group"].

    Attributes:
        optimizer: The inner optimizer.
        loss_scaler: A `LossScaler` or `DynamicLossScaler`.
        overflow_report: For the last skipped step, which gradients held how many inf and NaN.

    Raises:
        TypeError: `init_optimizer` is not an optimizer, is wrapped already, or holds a parameter of
            a dtype that is not floating.
        ValueError: `clip` or a loss scale is out of range.
    """

    # Old defaults of this module; apex_mp.optimizers.FP16_Optimizer has others.
    _DYNAMIC_DEFAULTS: Mapping[str, Any] = {}
    _ZERO_GRAD_SETS_NONE = False

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer | None = None,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        model: torch.nn.Module | None = None,
        clip: str = "group",
    ) -> None:
        # torch.optim.Optimizer.__init__ is not called: it would make param_groups of its own and wrap
        # step(), so that hooks meant for the inner optimizer would run twice.
        inner = _inner_of(init_optimizer, optimizer)
        if clip not in ("group", "global"):
            raise ValueError(f'FP16_Optimizer: clip is {clip!r}; it must be "group" or "global"')
        self.loss_scaler: LossScaler | DynamicLossScaler = (
            DynamicLossScaler(**{**self._DYNAMIC_DEFAULTS, **(dynamic_loss_args or {})})
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.optimizer = inner
        self.verbose = verbose
        self.clip = clip
        self.first_closure_call_this_step = True
        self.clip_grad_norm = torch.nn.utils.clip_grad_norm_
        self.overflow_report: list[_grads.NonFinite] = []
        self._names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        self._step_arguments = _legacy_arguments(inner)
        self._groups: list[MasterGroup] = []
        self._model_of: dict[Parameter, Parameter] = {}
        self._stage = _Stage.READY
        self._overflow: bool | None = False  # None: nobody has looked since the last backward
        self._holding = False  # masters' own .grad holds the unscaled gradients
        self._found_in_masters = False
        self._grad_scale: float | None = None  # of the gradients in the model; None: as loss_scale
        self._stash: list[tuple[Parameter, Tensor]] = []
        self._skips_in_a_row = 0
        self._iteration = 0
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        for group in inner.param_groups:
            self._adopt(group)

    # What torch.optim.Optimizer has, handed to the inner optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, which hold masters and fp32 parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "FP16_Optimizer was given to torch.amp.GradScaler, but scales the loss itself; use "
            "optimizer.backward(loss) and optimizer.step() without GradScaler, or GradScaler with "
            "the inner optimizer alone"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters; its low-precision ones get masters."""
        self.optimizer.add_param_group(param_group)
        self._adopt(self.optimizer.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

    # The loss scale and the old names of its parts.

    @property
    def loss_scale(self) -> float:
        """The factor on the loss; may be set."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = float(value)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adjusts itself; may be set."""
        return isinstance(self.loss_scaler, DynamicLossScaler)

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, value: bool) -> None:
        if bool(value) != self.dynamic_loss_scale:
            scale = self.loss_scale
            self.loss_scaler = (
                DynamicLossScaler(**{**self._DYNAMIC_DEFAULTS, "init_scale": scale})
                if value
                else LossScaler(scale)
            )

    @property
    def cur_iter(self) -> int:
        """Steps until now, skipped ones included; may be set."""
        scaler = self.loss_scaler
        return scaler.cur_iter if isinstance(scaler, DynamicLossScaler) else self._iteration

    @cur_iter.setter
    def cur_iter(self, value: int) -> None:
        self._iteration = value
        if isinstance(self.loss_scaler, DynamicLossScaler):
            self.loss_scaler.cur_iter = value

    @property
    def last_overflow_iter(self) -> int:
        """The last skipped step; may be set. Only with a dynamic loss scale, like the next two."""
        return self._dynamic("last_overflow_iter").last_overflow_iter

    @last_overflow_iter.setter
    def last_overflow_iter(self, value: int) -> None:
        self._dynamic("last_overflow_iter").last_overflow_iter = value

    @property
    def scale_factor(self) -> float:
        """Growth multiplies the loss scale by this, backing off divides; may be set."""
        return self._dynamic("scale_factor").scale_factor

    @scale_factor.setter
    def scale_factor(self, value: float) -> None:
        self._dynamic("scale_factor").scale_factor = value

    @property
    def scale_window(self) -> int:
        """Steps without overflow before the loss scale grows; may be set."""
        return self._dynamic("scale_window").scale_window

    @scale_window.setter
    def scale_window(self, value: int) -> None:
        self._dynamic("scale_window").scale_window = value

    def _dynamic(self, name: str) -> DynamicLossScaler:
        if not isinstance(self.loss_scaler, DynamicLossScaler):
            raise AttributeError(f"FP16_Optimizer has {name} only if dynamic_loss_scale is True")
        return self.loss_scaler

    # The parameters and the old names of their lists.

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The model's low-precision parameters, by group."""
        return [group.model_params for group in self._groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Parameter]]:
        """Their masters, by group."""
        return [group.master_params for group in self._groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Parameter]]:
        """Parameters that are their own masters, by group."""
        return [group.own_params for group in self._groups]

    @property
    def all_fp16_params(self) -> list[Parameter]:
        """The model's low-precision parameters."""
        return [param for group in self._groups for param in group.model_params]

    @property
    def all_fp32_from_fp16_params(self) -> list[Parameter]:
        """Their masters."""
        return [param for group in self._groups for param in group.master_params]

    @property
    def all_fp32_from_fp32_params(self) -> list[Parameter]:
        """Parameters that are their own masters."""
        return [param for group in self._groups for param in group.own_params]

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """Each group's masters as one vector; in-place writes are seen by step and model."""
        return [group.flat for group in self._groups]

    @property
    def fp16_groups_flat(self) -> list[Tensor]:
        """Each group's low-precision parameters as one vector, copied: writes have no effect."""
        return [
            torch.cat([param.detach().reshape(-1) for param in group.model_params])
            if group.model_params
            else torch.empty(0, dtype=torch.float16)
            for group in self._groups
        ]

    def _adopt(self, group: dict[str, Any]) -> None:
        # Masters whose grad is made on first look slow torch's own optimizers down, which always
        # look; so they are for inner optimizers that take scaled gradients.
        masters = MasterGroup(self._hold_master_grads if self._step_arguments else None)
        self._adopt_into(masters, group)
        self._groups.append(masters)
        if self.verbose:
            self._announce(len(self._groups) - 1, masters)

    def _adopt_into(self, masters: MasterGroup, group: dict[str, Any]) -> None:
        new = masters.adopt(group["params"])
        rekey_state(self.optimizer.state, new)
        self._model_of.update({master: model for model, master in new.items()})

    def _adopt_unfrozen(self) -> None:
        for masters, group in zip(self._groups, self.param_groups, strict=True):
            if any(param.requires_grad for param in masters.frozen_params):
                self._adopt_into(masters, group)
                self._holding = False

    def _announce(self, index: int, group: MasterGroup) -> None:
        print(f"FP16_Optimizer processing param group {index}:")
        for param in [*group.model_params, *group.own_params]:
            print(f"FP16_Optimizer received {param.type()} with {param.size()}")

    # Gradients.

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward on the scaled loss; gradients add up over several calls, as in torch.

        Args:
            loss: The loss, a scalar on the graph. It may be NaN or inf: only gradients decide.
            update_master_grads: Unscale the gradients now. With False call `update_master_grads()`
                after the last of several backward calls, or leave that to `step` [True].
            retain_graph: As in `Tensor.backward` [False].
        """
        self._adopt_unfrozen()
        self._bring_gradients_to_scale(self.loss_scale)
        self._stash_own_grads()
        self._overflow = None
        self._release_master_grads()
        wide = loss if loss.dtype == torch.float64 else loss.float()
        try:
            (wide * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException:
            self._unstash_own_grads()
            raise
        self._stage = _Stage.SCALED
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale what backward has accumulated; `.grad` of masters and fp32 parameters is then ready.

        Edits of masters' gradients made before are lost.
        """
        self._adopt_unfrozen()
        self._release_master_grads()
        found = self._unscale_own_grads()
        self._stage = _Stage.UNSCALED
        self._overflow = None
        if not self._step_arguments:
            self._hold_master_grads()
            self._overflow = found or self._found_in_masters

    def zero_grad(
        self, set_grads_to_None: bool | None = None, *, set_to_none: bool | None = None
    ) -> None:
        """Clear the gradients of the model's parameters and of the masters.

        Args:
            set_grads_to_None: Set them to None instead of zero. The old name.
            set_to_none: The same, by torch's name. Without either the old default of the module
                holds: False in fp16_utils, True in optimizers.
        """
        wish = set_to_none if set_to_none is not None else set_grads_to_None
        to_none = self._ZERO_GRAD_SETS_NONE if wish is None else wish
        self._stash.clear()
        self._release_master_grads()
        with torch.no_grad():
            for group in self._groups:
                for param in [*group.model_params, *group.own_params, *group.frozen_params]:
                    if param.grad is not None:
                        param.grad = None if to_none else param.grad.detach().zero_()
        self._stage = _Stage.READY
        self._grad_scale = None
        if not to_none and not self._step_arguments:
            self._hold_master_grads()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients of all groups together by their norm.

        Returns:
            Their norm before clipping, or -1 if they hold inf or NaN; then nothing is clipped.
        """
        self._be_unscaled()
        if self.overflow:
            return -1
        params = [param for group in self.param_groups for param in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the unscaled gradients, a list for each group, None where there is none.

        After an overflow they are worth nothing: a warning is printed, and None returned.
        """
        self._be_unscaled()
        if self.overflow:
            print(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state."
                "  Gradients are currently invalid (may be inf, nan, or stale).  Returning None."
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    @property
    def overflow(self) -> bool:
        """Whether the present gradients hold inf or NaN; after `step`, whether it was skipped."""
        if self._overflow is None:
            self._overflow = _grads.check(self._present_grads()).found_inf
        return self._overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._overflow = bool(value)

    @property
    def _inv_grad_scale(self) -> float:
        return 1.0 / (self.loss_scale if self._grad_scale is None else self._grad_scale)

    def _be_unscaled(self) -> None:
        """Unscale if backward was called without; and if the gradients came in another way."""
        if self._stage is _Stage.UNSCALED:
            return
        came_in = any(param.grad is not None for param in self.all_fp16_params)
        if self._stage is _Stage.SCALED or came_in:
            self.update_master_grads()

    def _bring_gradients_to_scale(self, scale: float) -> None:
        """Let gradients from before a change of the scale add up with those of now."""
        if self._grad_scale is not None and self._grad_scale != scale:
            with torch.no_grad():
                params = self.all_fp16_params
                if self._stage is _Stage.SCALED:
                    params = params + self.all_fp32_from_fp32_params
                old = [param.grad for param in params if param.grad is not None]
                if old:
                    torch._foreach_mul_(old, scale / self._grad_scale)
        self._grad_scale = scale

    def _stash_own_grads(self) -> None:
        """Put unscaled gradients aside, because backward is about to add scaled ones."""
        if self._stage is not _Stage.SCALED:
            for param in self.all_fp32_from_fp32_params:
                if param.grad is not None:
                    self._stash.append((param, param.grad))
                    param.grad = None

    def _unstash_own_grads(self) -> None:
        if self._stage is not _Stage.SCALED:
            for param, grad in self._stash:
                param.grad = grad
            self._stash.clear()

    @torch.no_grad()
    def _unscale_own_grads(self) -> bool:
        """Unscale the gradients of fp32 parameters; return whether they hold inf or NaN."""
        if self._stage is _Stage.UNSCALED:
            return False
        stash = {id(param): grad for param, grad in self._stash}
        alone: list[Tensor] = []
        sums: list[Tensor] = []
        more: list[Tensor] = []
        for param in self.all_fp32_from_fp32_params:
            earlier = stash.get(id(param))
            if param.grad is None:
                param.grad = earlier
            elif earlier is None:
                alone.append(param.grad)
            else:
                sums.append(earlier)
                more.append(param.grad)
                param.grad = earlier
        self._stash.clear()
        found = _grads.unscale(alone, alone, self._inv_grad_scale)
        return _grads.add_unscaled_(sums, more, self._inv_grad_scale) or found

    def _release_master_grads(self) -> None:
        self._holding = False
        for master in self.all_fp32_from_fp16_params:
            store_grad(master, None)

    @torch.no_grad()
    def _hold_master_grads(self) -> None:
        """Give every master its unscaled gradient, from the model's as they are now."""
        if self._holding:
            return
        masters: list[Parameter] = []
        sources: list[Tensor] = []
        for master, model in self._model_of.items():
            if model.grad is not None:
                masters.append(master)
                sources.append(_grads.lie_as(model.grad, master))
        targets = [torch.empty_like(master, requires_grad=False) for master in masters]
        self._found_in_masters = _grads.unscale(sources, targets, self._inv_grad_scale)
        for master, target in zip(masters, targets, strict=True):
            store_grad(master, target)
        self._holding = True

    def _grad_of(self, param: Parameter) -> Tensor | None:
        """The gradient that a step would use now: a master's own if it has one, else the model's."""
        model = self._model_of.get(param)
        return stored_grad(param) if model is None or self._holding else model.grad

    def _present_grads(self) -> list[list[Tensor]]:
        lists = [[self._grad_of(param) for param in group["params"]] for group in self.param_groups]
        return [[grad for grad in one if grad is not None] for one in lists]

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the masters and write them to the model, or skip if a gradient is inf or NaN.

        Args:
            closure: Clears the gradients, computes the loss, calls `self.backward` and returns the
                loss; for optimizers such as LBFGS. While it overflows the dynamic loss scale backs off
                and it is called again.

        Returns:
            What the inner optimizer's step returned; None if the step was skipped.
        """
        if closure is not None and not self._step_arguments:
            return self._step_with_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._be_unscaled()
        taken, value = self._step_fused() if self._step_arguments else self._step_plain()
        self._end_step(skipped=not taken)
        return loss if taken and value is None else value

    def _step_plain(self) -> tuple[bool, Any]:
        if self.overflow:
            return False, None
        self._call_pre_hooks()
        value = self.optimizer.step()
        self._copy_to_model()
        self._call_post_hooks()
        return True, value

    def _step_fused(self) -> tuple[bool, Any]:
        lists, scale = self._collect()
        checked = _check_lists(lists)
        if checked.found_inf:
            return False, None
        if self._optimizer_step_pre_hooks:
            self._call_pre_hooks()
            lists, scale = self._collect()  # A hook may have edited gradients.
            checked = _check_lists(lists)
        norms = checked.norms
        if self.clip == "global":
            norms = (checked.global_norm,) * len(norms)
        outputs = [[self._model_of.get(p) for p in group["params"]] for group in self.param_groups]
        arguments = {
            "grads": lists,
            "output_params": outputs,
            "scale": scale,
            "grad_norms": list(norms),
        }
        value = self.optimizer.step(
            **{name: arguments[name] for name in self._step_arguments}  # type: ignore[arg-type]
        )
        self._copy_to_model(except_for=self._written(lists))
        self._call_post_hooks()
        return True, value

    def _collect(self) -> tuple[list[list[Tensor | None]], float]:
        """The gradients as they lie, by group, and the one scale that they all have."""
        lists = [[self._grad_of(param) for param in group["params"]] for group in self.param_groups]
        pending = not self._holding and any(p.grad is not None for p in self.all_fp16_params)
        scale = 1.0 / self._inv_grad_scale if pending else 1.0
        if scale != 1.0:
            # The few fp32 parameters of a mixed model are unscaled already.
            for grads, group in zip(lists, self.param_groups, strict=True):
                for index, param in enumerate(group["params"]):
                    grad = grads[index]
                    if grad is not None and param not in self._model_of:
                        grads[index] = grad * scale
        return lists, scale

    def _written(self, lists: list[list[Tensor | None]]) -> set[int]:
        """Model parameters that the inner optimizer's step has written itself."""
        if not getattr(self.optimizer, "_writes_output_params", False):
            return set()
        return {
            id(self._model_of.get(param))
            for grads, group in zip(lists, self.param_groups, strict=True)
            for grad, param in zip(grads, group["params"], strict=True)
            if grad is not None
        }

    def _copy_to_model(self, except_for: Iterable[int] = ()) -> None:
        written = set(except_for)
        for group in self._groups:
            group.copy_to_model(lambda model: id(model) not in written)

    def _end_step(self, *, skipped: bool) -> None:
        self._overflow = skipped
        self._stage = _Stage.READY
        before = self.loss_scale
        iteration = self.cur_iter
        self.loss_scaler.update_scale(skipped)
        self._iteration += 1
        if not skipped:
            self._skips_in_a_row = 0
            return
        # A scheduler built on the inner optimizer would warn that its step was never called.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._skips_in_a_row += 1
        self.overflow_report = _grads.locate_nonfinite(self._named_grads())
        if self.verbose:
            print("\n".join([self._skip_message(iteration, before), *self._where()]))
        if self._skips_in_a_row == _SKIPS_BEFORE_WARNING:
            where = f" First: {self.overflow_report[0]}." if self.overflow_report else ""
            warnings.warn(
                f"FP16_Optimizer has skipped {_SKIPS_BEFORE_WARNING} steps in a row; the loss scale is "
                f"{self.loss_scale}. The gradients hold inf or NaN at any scale.{where}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _skip_message(self, iteration: int, before: float) -> str:
        message = f"OVERFLOW! Skipping step. Attempted loss scale: {before}"
        return message + (f", reducing to {self.loss_scale}" if self.dynamic_loss_scale else "")

    def _where(self) -> list[str]:
        """Lines that name the parameters whose gradients are not finite, the worst first."""
        lines = [f"  {found}" for found in self.overflow_report[:_PARAMETERS_NAMED]]
        more = len(self.overflow_report) - _PARAMETERS_NAMED
        return lines + ([f"  and {more} more parameters"] if more > 0 else [])

    def _named_grads(self) -> Iterable[tuple[str, Tensor]]:
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                grad = self._grad_of(param)
                if grad is not None:
                    name = self._names.get(id(self._model_of.get(param, param)))
                    if name is None and names is not None:
                        name = names[index]
                    yield name or f"group {number}, parameter {index}", grad

    def _call_pre_hooks(self) -> None:
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})

    def _call_post_hooks(self) -> None:
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})

    # Closures: the inner optimizer decides how often the loss is computed.

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        masters = [param for group in self.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in masters]
        state = [(key, _copy_state(value)) for key, value in self.state.items()]
        self.first_closure_call_this_step = True
        self._call_pre_hooks()
        try:
            value = self.optimizer.step(lambda: self._evaluate(closure))
        except _StepAbandoned:
            # The line search may have moved masters and state already: nothing of it remains.
            with torch.no_grad():
                torch._foreach_copy_(masters, before)
            self.state.clear()
            self.state.update(state)
            self._copy_to_model()
            self._end_step(skipped=True)
            return None
        self._copy_to_model()
        self._call_post_hooks()
        self._end_step(skipped=False)
        return value

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not self.first_closure_call_this_step:
            self._copy_to_model()
        self.first_closure_call_this_step = False
        loss = closure()
        self._be_unscaled()
        while self.overflow:
            before = self.loss_scale
            after = self.loss_scaler.loss_scale_value.update(True).scale
            if after >= before:
                raise _StepAbandoned
            self.loss_scaler.update_scale(True)
            if self.verbose:
                print(
                    "OVERFLOW within closure! Skipping step. "
                    f"Attempted loss scale: {before}, reducing to {self.loss_scale}"
                )
            loss = closure()
            self._be_unscaled()
        return loss

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return everything a resumed run needs, as tensors and plain values.

        `torch.load(..., weights_only=True)` reads it. Masters are copied. Keys: `loss_scaler`,
        `dynamic_loss_scale`, `overflow`, `first_closure_call_this_step`, `optimizer_state_dict`,
        `fp32_from_fp16` (masters, a list for each group).
        """
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": _checkpoint.masters(self._groups),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what `state_dict` returned, and write the masters to the model.

        Also takes the `fp32_groups_flat` and `cur_scale` of `apex_mp.optimizers.FP16_Optimizer`.

        Raises:
            ValueError: A key is missing, or masters do not fit; nothing is changed then.
        """
        scaler = _checkpoint.read_loss_scaler(state_dict, self.loss_scaler, self._DYNAMIC_DEFAULTS)
        masters = _checkpoint.read_masters(state_dict, self._groups)
        self.optimizer.load_state_dict(_checkpoint.required(state_dict, "optimizer_state_dict"))
        self.loss_scaler = scaler
        self._iteration = int(state_dict.get("cur_iter", self._iteration))
        self._overflow = bool(state_dict.get("overflow", False))
        self.first_closure_call_this_step = bool(
            state_dict.get("first_closure_call_this_step", True)
        )
        with torch.no_grad():
            for master, saved in masters:
                master.copy_(saved)
        self._copy_to_model()


def _inner_of(
    init_optimizer: torch.optim.Optimizer | None, optimizer: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    if (init_optimizer is None) == (optimizer is None):
        raise TypeError("FP16_Optimizer: give the optimizer to wrap once, as init_optimizer=")
    inner = init_optimizer if init_optimizer is not None else optimizer
    if isinstance(inner, FP16_Optimizer):
        raise TypeError("FP16_Optimizer: init_optimizer is an FP16_Optimizer; wrap the inner one")
    # Old code brings optimizers of its own that do not derive from torch's.
    if not (hasattr(inner, "param_groups") and callable(getattr(inner, "step", None))):
        raise TypeError(
            f"FP16_Optimizer: init_optimizer is a {type(inner).__name__}; it must be an optimizer"
        )
    return inner  # type: ignore[return-value]


def _legacy_arguments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The arguments of the legacy call that an optimizer's step takes, or none of them."""
    parameters = inspect.signature(optimizer.step).parameters
    if not {"grads", "output_params", "scale"} <= set(parameters):
        return ()
    return tuple(
        name for name in ("grads", "output_params", "scale", "grad_norms") if name in parameters
    )


def _check_lists(lists: list[list[Tensor | None]]) -> _grads.Checked:
    return _grads.check([[grad for grad in one if grad is not None] for one in lists])


def _copy_state(value: Any) -> Any:
    """A copy of an optimizer's state of one parameter: tensors, and lists and dicts of them."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy_state(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_state(item) for item in value]
    return copy.copy(value)
