"""The API of tf.contrib.mixed_precision: loss-scale managers, and an optimizer that uses one.

manager = ExponentialUpdateLossScaleManager(init_loss_scale=2**32, incr_every_n_steps=1000)
optimizer = LossScaleOptimizer(FusedAdam(model.parameters()), manager)
...
optimizer.minimize(loss)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.tensors import params_of
from apex_mp.fp16_utils import FP16_Optimizer, LossScaler
from apex_mp.loss_scale import (
    FLOAT32_MAX,
    DynamicLossScale,
    LossScale,
    StaticLossScale,
    check_floats,
    check_ints,
    is_of_grad_scaler,
    round_to_float32,
)
from apex_mp.masters.masters import MasterGroup

__all__ = [
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "LossScaleManager",
    "LossScaleOptimizer",
]

# Keys of a manager's state, with TensorFlow's names, and the fields of a loss scale.
_STATE = {"loss_scale": "scale", "num_good_steps": "good_steps", "num_bad_steps": "overflows"}


class LossScaleManager:
    """Base class of the managers: a loss scale, which each step updates; several may share one.

    Args:
        loss_scale: The initial loss scale, an object of `apex_mp.loss_scale`.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._value = loss_scale

    def get_loss_scale(self) -> float:
        """Return the factor on the loss, a float32 number."""
        return self._value.scale

    def update_loss_scale(self, finite_grads: bool | Tensor) -> None:
        """Update the loss scale after a step.

        Args:
            finite_grads: Whether no gradient held inf or NaN: a bool, or a bool tensor of one
                element; with False the caller skips the step.

        Raises:
            TypeError: It is something else.
        """
        self._update(not self._as_bool(finite_grads))

    def _update(self, is_bad: bool) -> None:
        self._value = self._value.update(is_bad)

    def _as_bool(self, finite_grads: Any) -> bool:
        one = math.prod(getattr(finite_grads, "shape", (2,))) == 1  # numpy has them too.
        value = finite_grads.item() if one else finite_grads
        if not isinstance(value, bool):
            raise TypeError(
                f"{type(self).__name__}.update_loss_scale: finite_grads is {finite_grads!r:.80}; "
                "it must be a bool, or a bool tensor of one element"
            )
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, and the counts of steps if there are any, as plain values."""
        values = vars(self._value)
        return {key: values[field] for key, field in _STATE.items() if field in values}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; the arguments of the constructor stay.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            TypeError, ValueError: A key is missing or unknown, or a value is out of range; nothing
                is changed then.
        """
        mine = [*self.state_dict()]
        if not isinstance(state_dict, Mapping) or {*state_dict} != {*mine}:
            keys = [*state_dict] if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the state has {keys}; it must be a dict "
                f"with the keys {mine}"
            )
        self._value = dataclasses.replace(
            self._value, **{_STATE[key]: value for key, value in state_dict.items()}
        )


class FixedLossScaleManager(LossScaleManager):
    """A loss scale that never changes; a step that overflows is skipped all the same.

    Args:
        loss_scale: Factor on the loss, at least 1.

    Raises:
        TypeError, ValueError: `loss_scale` is no number, less than 1, or no float32 number.
    """

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        check_floats(self, "loss_scale", low=1.0, high=FLOAT32_MAX)
        super().__init__(StaticLossScale(round_to_float32(self.loss_scale)))


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """A loss scale that grows after good steps in a row and shrinks after bad ones.

    The rule is that of `apex_mp.loss_scale.DynamicLossScale` with a minimum of 1, except that bad
    steps are counted anew once the scale has shrunk. A bad step resets the count of good steps; a
    good step not that of bad ones. Numbers are float32: scales equal TensorFlow's to the bit.

    Args:
        init_loss_scale: Factor on the loss at first, at least 1.
        incr_every_n_steps: Good steps in a row before the scale grows, at least 1.
        decr_every_n_nan_or_inf: Bad steps, in a row or not, before the scale shrinks, at least 1
            [2].
        incr_ratio: Growth multiplies the scale by this, at least 1 [2].
        decr_ratio: Shrinking multiplies the scale by this, between 0 and 1 [0.8].

    Raises:
        TypeError, ValueError: An argument is no number, a count no int, or one is out of range.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        self.init_loss_scale = init_loss_scale
        self.incr_every_n_steps = incr_every_n_steps
        self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
        self.incr_ratio = incr_ratio
        self.decr_ratio = decr_ratio
        check_floats(self, "init_loss_scale", "incr_ratio", low=1.0, high=FLOAT32_MAX)
        check_floats(self, "decr_ratio", low=0.0, high=1.0, excluding_ends=True)
        check_ints(self, "incr_every_n_steps", "decr_every_n_nan_or_inf", low=1)
        super().__init__(
            DynamicLossScale(
                round_to_float32(self.init_loss_scale),
                growth_factor=round_to_float32(self.incr_ratio),
                backoff_factor=round_to_float32(self.decr_ratio),
                growth_interval=incr_every_n_steps,
                min_scale=1.0,
                hysteresis=decr_every_n_nan_or_inf,
            )
        )

    def _update(self, is_bad: bool) -> None:
        shrinks = is_bad and vars(self._value)["overflows"] + 1 >= self.decr_every_n_nan_or_inf
        super()._update(is_bad)
        if shrinks:
            self._value = dataclasses.replace(self._value, overflows=0)  # type: ignore[arg-type]


class _ManagedScaler(LossScaler):
    """A loss scaler for FP16_Optimizer that uses a manager."""

    def __init__(self, manager: LossScaleManager) -> None:
        self.manager = manager

    @property
    def cur_scale(self) -> float:
        return self.manager.get_loss_scale()

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        raise AttributeError(
            f"LossScaleOptimizer: the loss scale was to be set to {value!r}; it is that of the "
            "loss_scale_manager, make the manager with it"
        )

    def update_scale(self, overflow: bool) -> None:
        self.manager.update_loss_scale(not overflow)

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.manager.load_state_dict(state_dict)

    def __copy__(self) -> _ManagedScaler:
        """Return a scaler with a copy of the manager, on which a state can be tried."""
        manager = object.__new__(type(self.manager))
        vars(manager).update(vars(self.manager))
        return _ManagedScaler(manager)


class LossScaleOptimizer(FP16_Optimizer):
    """An optimizer that scales the loss by a manager, as in tf.contrib.mixed_precision.

        optimizer.minimize(loss)

    or, to change gradients before they are applied,

        grads_and_vars = optimizer.compute_gradients(loss)
        optimizer.apply_gradients([(grad.clamp(-1, 1), var) for grad, var in grads_and_vars])

    It is an `apex_mp.fp16_utils.FP16_Optimizer`, so it has `backward`, `step`, `overflow_report`
    and so on. float32 variables, with a model that computes in float16 by casts, are their own
    masters; float16 parameters get float32 masters, which are the variables. Other attributes are
    those of the inner optimizer. On a GPU the host waits for each step, because the manager is on
    the host.

    Args:
        opt: Any torch optimizer.
        loss_scale_manager: The manager; each step updates it.
        verbose: Log (which prints) why steps are skipped [True].
        model: The module whose names overflow messages use [None: group and index].

    Raises:
        TypeError: `opt` is no optimizer, or is wrapped already; `loss_scale_manager` is no
            `LossScaleManager`.
    """

    _ZERO_GRAD_SETS_NONE = True

    def __init__(
        self,
        opt: Any,
        loss_scale_manager: LossScaleManager,
        *,
        verbose: bool = True,
        model: torch.nn.Module | None = None,
    ) -> None:
        if isinstance(opt, FP16_Optimizer) or not hasattr(opt, "param_groups"):
            raise TypeError(
                f"LossScaleOptimizer: opt is a {type(opt).__name__}; it must be a torch optimizer "
                "that is not wrapped"
            )
        if not isinstance(loss_scale_manager, LossScaleManager):
            raise TypeError(
                f"LossScaleOptimizer: loss_scale_manager is {loss_scale_manager!r}; it must be a "
                "LossScaleManager, such as FixedLossScaleManager(128.0)"
            )
        self._manager = loss_scale_manager
        scaler = _ManagedScaler(loss_scale_manager)
        super().__init__(opt, dynamic_loss_scale=scaler, verbose=verbose, model=model)

    @property
    def _opt(self) -> Any:
        """The inner optimizer, by TensorFlow's name."""
        return self.optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # Not there yet.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def compute_gradients(
        self, loss: Tensor | Callable[[], Tensor], var_list: Iterable[Tensor] | None = None
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Run backward on the scaled loss; return pairs of an unscaled gradient and its variable.

        Earlier gradients are cleared: they do not add up.

        Args:
            loss: A scalar on the graph, or a function without arguments that returns one.
            var_list: The variables: parameters of the model, or their masters [None: all].

        Returns:
            For each variable the gradient in its dtype, or None if the loss does not depend on it.
            The variable of a float16 parameter is its float32 master.

        Raises:
            TypeError: `loss` is no floating tensor.
            ValueError: The optimizer has no such variable.
        """
        variables = self._variables() if var_list is None else self._variables_of(var_list)
        self.zero_grad()
        self.backward(loss() if callable(loss) else loss)
        return [(var.grad, var) for var in variables]

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """Step with the gradients given, or skip if one holds inf or NaN; update the manager.

        Only these variables are stepped. Afterwards `overflow` says whether the step was skipped.

        Args:
            grads_and_vars: Pairs as `compute_gradients` returns them.

        Raises:
            ValueError: There are no pairs, a variable is given twice, or the optimizer has no such
                variable.
        """
        pairs = [*grads_and_vars]
        given = self._variables_of(var for _, var in pairs)
        if not given or len({*map(id, given)}) < len(given):
            raise ValueError(
                f"LossScaleOptimizer.apply_gradients: grads_and_vars has {len(given)} pairs for "
                f"{len({*map(id, given)})} variables; there must be one pair for each, and at "
                "least one"
            )
        grad_of = {id(var): grad for var, (grad, _) in zip(given, pairs, strict=True)}
        for var in self._variables():
            grad = grad_of.get(id(var))
            if grad is not var.grad:
                var.grad = grad
        self.step()

    def minimize(
        self, loss: Tensor | Callable[[], Tensor], var_list: Iterable[Tensor] | None = None
    ) -> None:
        """Call `compute_gradients` and `apply_gradients`; arguments and errors are theirs.

        Args:
            loss: As of `compute_gradients`.
            var_list: As of `compute_gradients` [None].
        """
        self.apply_gradients(self.compute_gradients(loss, var_list))

    def _variables(self) -> list[Tensor]:
        return params_of(self)

    def _variables_of(self, var_list: Iterable[Tensor]) -> list[Tensor]:
        """Return the variables for a list of variables and parameters of the model."""
        mine: dict[int, Tensor] = {id(var): var for var in self._variables()}
        mine |= {id(param): master for master, param in self._masters.model_of.items()}
        given = [*var_list]
        for number, var in enumerate(given):
            if id(var) not in mine:
                kind = f"shape {[*var.shape]}" if isinstance(var, Tensor) else type(var).__name__
                raise ValueError(
                    f"LossScaleOptimizer: variable {number} ({kind}) is none of this optimizer; "
                    "give parameters of the model, or what compute_gradients returned"
                )
        return [mine[id(var)] for var in given]

    # Attributes and methods of FP16_Optimizer that concern its scaler.

    @property
    def dynamic_loss_scale(self) -> bool:
        """False, because the manager decides how the loss scale changes."""
        return False

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, value: Any) -> None:
        self._set_scaler(value)

    def _set_scaler(self, value: Any) -> None:
        if not isinstance(value, _ManagedScaler):
            raise TypeError(
                f"LossScaleOptimizer: the loss scale was to be {value!r}; it is that of the "
                "loss_scale_manager"
            )
        self._manager.load_state_dict(value.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, or the state of the inner optimizer.

        The manager's loss scale and counts are loaded too, if the state has them.

        Args:
            state_dict: The result of `state_dict` of this or of the inner optimizer.

        Raises:
            TypeError, ValueError: The state does not fit, or is that of an FP16_Optimizer or a
                GradScaler, which have another rule; nothing is changed then.
        """
        foreign = is_of_grad_scaler(state_dict) or (
            isinstance(state_dict, Mapping) and state_dict.get("dynamic_loss_scale")
        )
        if foreign:
            raise ValueError(
                "LossScaleOptimizer.load_state_dict: the state is that of a GradScaler or an "
                "FP16_Optimizer, whose loss scale has another rule; make the loss_scale_manager "
                "with its scale, and load the state of the optimizer alone"
            )
        super().load_state_dict(state_dict)

    def _announce(self, index: int, group: MasterGroup) -> None:
        """Print nothing."""

    def _skip_message(self, iteration: int, scale: float) -> str:
        return (
            f"Step {iteration} is skipped: gradients overflow at loss scale {scale}; the next is "
            f"{self._manager.get_loss_scale()}"
        )
