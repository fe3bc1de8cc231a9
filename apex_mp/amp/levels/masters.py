"""float32 masters inside an optimizer that stays the user's own object."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.amp._scale_loss.loss_grads import LossGrads, Unscaling, dense_values
from apex_mp.amp._scale_loss.step_guard import guard_of
from apex_mp.amp.casts.casting import is_low
from apex_mp.core import tensors
from apex_mp.core.log import logger, see
from apex_mp.grads.found_inf import FoundInf
from apex_mp.masters import parallel_masters
from apex_mp.masters.attach import Addition, attach, own
from apex_mp.masters.joined import joined
from apex_mp.masters.masters import Masters
from apex_mp.masters.steps_of_masters import StepWatch
from apex_mp.masters.weight_watch import WeightWatch
from apex_mp.saved.amp import MasterState
from apex_mp.saved.dcp import CheckpointView, attribute_with_checkpoint_view, with_checkpoint_view
from apex_mp.scale.amp_scaler import LossScaler

_LOG = logger("apex_mp.amp")
_ADVICE_FOR_WRITES = (
    "Write weights to amp.master_params(optimizer) too, or load them by model.load_state_dict"
)


class _Grads(enum.Enum):
    """The last event of the masters' gradients."""

    NEW = "they got those of a block"
    USED = "a step has used them"
    CLEARED = "zero_grad has cleared them"


class OptimizerMasters(Masters):
    """The masters in an optimizer's groups, which each step copies to the model.

    It has no reference to the optimizer, so that a shallow copy of that shares it.

    Args:
        model_state: What the models' hooks save and load; not kept alive.

    Attributes:
        weights: Detects writes to the model between steps.
    """

    def __init__(self, model_state: MasterState) -> None:
        super().__init__()
        if model_state.masters is None:
            model_state.masters = {}
        self._masters = model_state.masters
        self._model_state = weakref.ref(model_state)
        self._is_copy = False
        self._grads = _Grads.NEW
        self._known_grads = _C.GradVersions()
        self._has_warned = False
        self._steps = StepWatch("amp", self)
        self.weights = WeightWatch("amp", self, _described, _ADVICE_FOR_WRITES)
        parallel_masters.add(self)

    # Copies.

    def __reduce__(self) -> Any:
        return _linked, ([*self.model_of.items()], self._model_state())

    def link_copy(self, pairs: Iterable[tuple[Parameter, Parameter]]) -> None:
        """Adopt pairs of master and model parameter that were copied together."""
        self._is_copy = True
        self.model_of.update(pairs)
        self._masters.update({model: master for master, model in self.model_of.items()})

    def check_linked(self, name: str) -> None:
        """Raise if the optimizer is a copy, and the model was not copied with it.

        Args:
            name: The optimizer's class, for the message.
        """
        if self._is_copy and self._model_state() is None:
            raise RuntimeError(
                f"scale_loss: this {name} was copied or pickled without its model, so its float32 "
                "masters belong to no model and would train nothing; copy both in one call, "
                "copy.deepcopy((model, optimizer)), or pickle both in one tuple"
            )

    # Parameters.

    def adopt_all(self, optimizer: Any, originals: Mapping[Tensor, Tensor]) -> None:
        """Put masters into the parameter lists of all groups.

        Args:
            optimizer: Its groups and state are changed.
            originals: float32 values of parameters before the model was cast, which become the
                masters, so nothing is lost by the cast.
        """

        def master_of(param: Parameter) -> Parameter:
            master = self._masters.get(param)
            if master is None:
                master = Parameter(originals.get(param, param).data.float())
                self._masters[param] = master
            else:  # An earlier optimizer's, whose weight may have been written.
                master.data.copy_(joined(param, master))
            return master

        for group in optimizer.param_groups:
            self.adopt(group["params"], optimizer.state, master_of)

    def copy_to_model(self, except_for: Collection[int] = ()) -> None:
        """Write each master, rounded, to the model."""
        super().copy_to_model(except_for)
        if self.model_of:
            self.weights.note_masters()

    # Gradients of masters are made when a block of scale_loss ends.

    def begin_block(self, optimizer: Any) -> None:
        """Prepare for a block: clear masters' gradients that a step has used.

        Parameters that require grad only now get masters.
        """
        self.adopt_all(optimizer, {})
        self.weights.check_masters()
        if self._grads is _Grads.USED:
            for master in self.model_of:
                master.grad = None
        self._grads = _Grads.NEW

    def end_block(self) -> None:
        """Mark the gradients of the model as known, whether the block raised or not."""
        self._known_grads.record([*self.model_of.values()])

    def cleared(self, *, to_none: bool) -> None:
        """Note that the masters' gradients are cleared, and clear the model's: None, or zero."""
        self._grads = _Grads.CLEARED
        for master, model in self.model_of.items():
            if model.grad is None:
                continue
            model.grad = None if to_none else model.grad.detach().zero_()
            if model.grad is not None and master.grad is None:  # After a step that was skipped.
                master.grad = torch.zeros_like(model.grad, dtype=master.dtype)
        self.end_block()

    # Steps.

    def before_step(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Check weights and gradients, and let a closure compute with new weights; a pre-hook."""
        self.weights.before_step()
        self._steps.before_step()
        if len(args) < 2 and "closure" not in kwargs:
            self._check_grads()
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._with_new_weights(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._with_new_weights(kwargs["closure"])}
        return None

    def _check_grads(self) -> None:
        """Raise, or warn once, if the model has gradients that the masters' do not include."""
        models = [*self.model_of.values()]
        if not self._known_grads.changed(models):
            return
        if self._grads is _Grads.NEW and any(master.grad is not None for master in self.model_of):
            self._warn_of_edits()
            return
        grads = [model.grad for model in models if model.grad is not None]
        if any(dense_values(grad).any() for grad in grads):  # All zeros: cleared by the user.
            raise RuntimeError(
                "step() found gradients of the model that are not in those of its float32 masters; "
                "call backward in `with amp.scale_loss(loss, optimizer) as scaled_loss:`"
            )

    def _warn_of_edits(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "step() uses the gradients that scale_loss gave to the float32 masters; those of "
                "the model were changed since then, which has no effect: clip, edit and average "
                "those of amp.master_params(optimizer), and call backward in scale_loss"
                + see("gradients-edited-twice")
            )

    def _with_new_weights(self, closure: Any) -> Any:
        @functools.wraps(closure)
        def wrapper() -> Any:
            self.copy_to_model()
            return closure()

        return wrapper

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Write the new weights to the model; a hook after each step."""
        self._grads = _Grads.USED
        self._steps.after_step(optimizer)
        self.weights.begin()


def _described(master: Parameter) -> str:
    return f"parameter of size {[*master.shape]}"


def _linked(
    pairs: list[tuple[Parameter, Parameter]], model_state: MasterState | None
) -> OptimizerMasters:
    # Without a model this MasterState is freed when the copy is complete: see check_linked.
    masters = OptimizerMasters(model_state or MasterState())
    masters.link_copy(pairs)
    return masters


class OptimizerWithMasters(Addition):
    """What an optimizer has beside its own class when it gets masters."""

    _amp_initialized = True
    _amp_masters: OptimizerMasters

    @classmethod
    def _members(cls, own: Any) -> dict[str, Any]:
        return {
            name: attribute_with_checkpoint_view(name, own) for name in ("param_groups", "state")
        }

    @property
    def _amp_model_of(self) -> Mapping[Parameter, Parameter]:
        return self._amp_masters.model_of

    # The arguments are those of the optimizer's own class, which may differ from torch's.

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        own(self, OptimizerWithMasters).zero_grad(*args, **kwargs)
        to_none = next(iter((*args, *kwargs.values())), True)
        self._amp_masters.cleared(to_none=to_none)

    def add_param_group(self, param_group: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        params, names = tensors.listed(param_group)
        if any(param is model for param in params for model in self._amp_model_of.values()):
            raise ValueError("some parameters appear in more than one parameter group")
        check_group(len(self.param_groups), params, names)
        own(self, OptimizerWithMasters).add_param_group(param_group, *args, **kwargs)
        self._amp_masters.adopt_all(self, {})

    @with_checkpoint_view
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        saved: dict[str, Any] = own(self, OptimizerWithMasters).state_dict(*args, **kwargs)
        return saved

    @with_checkpoint_view
    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        own(self, OptimizerWithMasters).load_state_dict(state_dict, *args, **kwargs)

    def _checkpoint_view(self) -> CheckpointView:
        # The model saves the masters.
        return CheckpointView(
            self, lambda inner, *_: self.load_state_dict(inner), self._amp_model_of
        )

    def _copied(self) -> OptimizerMasters:
        return self._amp_masters

    def _restore(self, copied: OptimizerMasters) -> None:
        _install(self, copied)
        guard_of(self)


def check_group(number: int, params: Iterable[Any], names: Sequence[str] | None) -> None:
    """Raise a TypeError if a parameter of a group cannot have a master."""
    tensors.check_params("amp.initialize", number, params, tensors.not_castable, names)


def give_masters(
    optimizer: torch.optim.Optimizer, originals: Mapping[Tensor, Tensor], model_state: MasterState
) -> None:
    """Put masters into an optimizer, and make its class one whose copies keep them.

    The object stays what it was, for schedulers that hold it; its class becomes a subclass of the
    same name.

    Args:
        optimizer: Its groups, state and class are changed.
        originals: As for `OptimizerMasters.adopt_all`.
        model_state: What the models' hooks save and load.
    """
    masters = OptimizerMasters(model_state)
    masters.adopt_all(optimizer, originals)
    masters.weights.begin()
    masters.weights.note_masters()
    attach(optimizer, OptimizerWithMasters)
    _install(optimizer, masters)


def _install(optimizer: Any, masters: OptimizerMasters) -> None:
    optimizer._amp_masters = masters
    attach_apex_names(optimizer)
    optimizer.register_step_pre_hook(masters.before_step)
    optimizer.register_step_post_hook(masters.after_step)


def attach_apex_names(optimizer: Any) -> None:
    """Put apex's attributes on an optimizer that went through `amp.initialize`."""
    has_masters = hasattr(optimizer, "_amp_masters")
    state = (StateWithMasters if has_masters else StateWithoutMasters)(optimizer)
    optimizer._amp_stash = state
    optimizer._amp_lazy_init = optimizer._lazy_init_maybe_master_weights = state._adopt
    optimizer._master_params_to_model_params = state._copy_to_model
    optimizer._prepare_amp_backward = state._prepare_backward
    optimizer._post_amp_backward = state._end_backward


class AmpOptimizerState:
    """`optimizer._amp_stash`: the parameters by dtype, and the pieces of `amp.scale_loss`.

    Lists are made when they are read; what is done to a list has no effect, what is done to its
    tensors has.

    Args:
        optimizer: The optimizer; not kept alive. None for a copy.

    Attributes:
        lazy_init_called: Whether there are masters; clients set it, too.
        already_patched: Whether a client has replaced `step` to skip one.
    """

    lazy_init_called = True
    already_patched = False

    def __init__(self, optimizer: Any) -> None:
        self._reference = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._is_scaled = False
        self._grads: LossGrads | None = None

    def __reduce__(self) -> Any:
        return type(self), (None,)  # A copy belongs to no optimizer.

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients were left scaled, by `delay_unscale` or a client's own block."""
        return self._is_scaled or guard_of(self._optimizer).scaled_by is not None

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        self._is_scaled = value
        if not value:
            guard = guard_of(self._optimizer)
            guard.scaled_by = None
            guard.scalers.clear()

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's parameters in 16 bits."""
        return _flat(self.fp16_groups)

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The same by group."""
        return [[model for _, model in pairs if is_low(model.dtype)] for pairs in self._pairs()]

    @property
    def dummy_overflow_buf(self) -> Tensor:
        """An int32 tensor of one element for calls of amp_C, new each time."""
        params = [master for pairs in self._pairs() for master, _ in pairs]
        return torch.zeros(1, dtype=torch.int32, device=params[0].device if params else None)

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("_amp_stash: its optimizer is no more, or this one is a copy")
        return optimizer

    def _pairs(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield, for each group, what is stepped and the model's parameter, which may be one."""
        optimizer = self._optimizer
        model_of = getattr(optimizer, "_amp_model_of", {})
        for group in optimizer.param_groups:
            yield [(p, model_of.get(p, p)) for p in group["params"] if p.requires_grad]

    # Methods of the optimizer.

    def _adopt(self) -> None:
        """Do nothing: parameters have had masters, if any, since amp.initialize."""

    def _copy_to_model(self) -> None:
        """Write masters, rounded, to the model."""

    def _prepare_backward(self) -> None:
        """Set gradients aside before a backward of a scaled loss."""
        self._grads = LossGrads([self._optimizer], [None])
        self._grads.stash()

    def _end_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients of that backward, and add those that were set aside."""
        optimizer, guard, scale = self._optimizer, guard_of(self._optimizer), scaler.loss_scale()
        grads, self._grads = self._grads, None
        if grads is None:  # They were left scaled.
            grads = LossGrads([optimizer], [scale])
            grads.stash()
        unscaling = Unscaling(scale, [FoundInf()])
        grads.unscale(unscaling)
        scaler.note_overflow(bool(unscaling.found_inf) or bool(unscaling.found_in_sums[0]))
        self.params_have_scaled_gradients = False
        guard.scaler, guard.scale = scaler, scale


class StateWithoutMasters(AmpOptimizerState):
    """That of an optimizer that steps the model's own parameters: O0, O1, O3."""

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The parameters in float32."""
        return [p for pairs in self._pairs() for p, _ in pairs if not is_low(p.dtype)]

    @property
    def all_fp16_grad_stash(self) -> list[Tensor | None]:
        """None for each of `all_fp16_params`: gradients are set aside elsewhere."""
        return [None] * len(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[Tensor | None]:
        """None for each of `all_fp32_params`."""
        return [None] * len(self.all_fp32_params)


class StateWithMasters(AmpOptimizerState):
    """That of an optimizer with float32 masters: O2."""

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of `all_fp16_params`."""
        return _flat(self.fp32_from_fp16_groups)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The same by group."""
        return [[p for p, model in pairs if is_low(model.dtype)] for pairs in self._pairs()]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The model's parameters in float32, such as those of batch norms."""
        return _flat(self.fp32_from_fp32_groups)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The same by group."""
        return [[p for p, model in pairs if not is_low(model.dtype)] for pairs in self._pairs()]

    @property
    def all_fp32_from_fp32_grad_stash(self) -> list[Tensor | None]:
        """None for each of `all_fp32_from_fp32_params`: gradients are set aside elsewhere."""
        return [None] * len(self.all_fp32_from_fp32_params)

    def _adopt(self) -> None:
        """Give masters to parameters that require grad only now."""
        self._optimizer._amp_masters.adopt_all(self._optimizer, {})

    def _copy_to_model(self) -> None:
        self._optimizer._amp_masters.copy_to_model()

    def _prepare_backward(self) -> None:
        self._optimizer._amp_masters.begin_block(self._optimizer)
        super()._prepare_backward()

    def _end_backward(self, scaler: LossScaler) -> None:
        super()._end_backward(scaler)
        self._optimizer._amp_masters.end_block()


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [param for group in groups for param in group]
