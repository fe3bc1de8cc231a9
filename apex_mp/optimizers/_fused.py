"""The base class of all fused optimizers: options, the call of a step, and the state it makes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import readback, tensors
from apex_mp.core.spelling import did_you_mean
from apex_mp.engine import offload as _offload
from apex_mp.engine.devices import zero_group
from apex_mp.engine.engine import Engine
from apex_mp.engine.host_grads import HostGrads
from apex_mp.masters import parallel_masters
from apex_mp.masters.param_names import ParamNames
from apex_mp.masters.store import MasterStore
from apex_mp.optimizers._hints import warn_of_lost_updates
from apex_mp.saved.dcp import is_called_for_state
from apex_mp.saved.fused import SavedOptimizer
from apex_mp.step import step_call
from apex_mp.step.scaled_step import GradCheck, ScaledStep, drop_amp_tensors


class FusedOptimizer(SavedOptimizer):
    """A fused optimizer: one that steps all tensors on a device in one call.

    A subclass defines its signature, the names of its options and of its state, and their checks:
    the attributes and methods under "Defined by each optimizer", here and in `saved/fused.py`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        defaults: The options of groups that lack them.
        unscale_grads: True, False or None.
        master_weights: Whether parameters in low precision have float32 masters in their state:
            True, False, "split" or "float32", see `FusedAdam`.
        offload: Whether masters and moments are in host memory, see `FusedAdam`.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to step(): it sets self.grad_scale and
    # self.found_inf around the call.
    _step_supports_amp_scaling = True
    # FP16_Optimizer need not copy masters to the model after step(output_params=...).
    _writes_output_params = True
    unscale_grads: bool | None = None  # for optimizers pickled before the option existed
    _engine: Engine
    _host_grads: HostGrads | None = None
    _has_warned = False
    _asks_for_masters = "master_weights=True"
    _zero_group: Any = None  # of processes that step parts of the parameters

    # --- Defined by each optimizer.

    def _check_new_options(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group that is added; a loaded group need not pass."""
        self._check_options(group)

    # --- Options.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _naming_options(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        unscale_grads: bool | None,
        master_weights: bool | str,
        offload: bool | str = False,
    ) -> None:
        _offload.check_option(self._public_name, offload)
        self.offload = offload
        self._own_masters = MasterStore()
        # Only then: without it groups have the keys of apex and torch.
        if master_weights:
            defaults = {**defaults, "master_weights": master_weights}
        self._check_new_options(defaults)
        step_call.check_unscale_grads(self._public_name, unscale_grads)
        self.unscale_grads = unscale_grads
        self._zero_group = zero_group()
        super().__init__(params, defaults)
        if self._zero_group is None:
            parallel_masters.add_optimizer(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks are the constructor's.

        Raises:
            MemoryError: With `offload` its states need more than the container's limit leaves.
            RuntimeError: A hyperparameter asks for what this optimizer does not have.
            TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
                hyperparameter is no number.
            ValueError: A hyperparameter is out of range.
        """
        if isinstance(param_group, dict):  # torch says so otherwise
            self._check_new_options({**self.defaults, **param_group})
        params, names = tensors.listed(param_group)
        number = len(self.param_groups)
        test = tensors.part_not_steppable if self._rule.steps_parts else tensors.not_steppable
        tensors.check_params(self._public_name, number, params, test, names)
        if self.offload and params:
            _offload.check_group(self, {**self.defaults, **param_group, "params": params}, names)
        super().add_param_group(param_group)
        self._watch_gradients()

    def refresh_hyperparameters(self) -> None:
        """Make the step in a captured CUDA graph use the present options of the groups.

        Call it between replays, outside of a capture, after `param_groups` was changed, by a
        scheduler or by hand. Steps that are not replayed do not need it, nor does a tensor as `lr`.
        """
        self._present_engine().refresh_groups(self, self.param_groups)

    # --- The step.

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
            ValueError: `grads`, `output_params` or `grad_norms` do not fit the groups, or a
                hyperparameter is out of range now.
        """
        readback.poll()  # Plain loops have nothing else that does.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            step = step_call.scaled_step(
                self._public_name, self, grads, output_params, scale, grad_norms
            )
            is_first = not self.__dict__["state"]
            if step.warns and not self._has_warned:
                self._warn_of_lost_updates()
            with torch.no_grad():
                step.result = self._present_engine().step(self, self.param_groups, step)
                if is_first and is_called_for_state():
                    for state in self.state.values():
                        if "step" in state:
                            state["step"].zero_()
        except BaseException:
            drop_amp_tensors(self)
            raise
        return loss

    step.takes_scaled_step = True  # type: ignore[attr-defined]

    def check_gradients(self, step: ScaledStep) -> GradCheck:
        """Check and measure gradients for a step that is taken later, by `take` with an equal one.

        Args:
            step: The step; it has `check` and `clip_to`.
        """
        return self._present_engine().check_gradients(self, self.param_groups, step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        if self.offload != "gradients":
            return
        if self._host_grads is None:
            self._host_grads = HostGrads(self._public_name)
        for number, group in enumerate(self.param_groups):
            self._host_grads.watch(number, group)

    def _present_engine(self) -> Engine:
        engine: Engine | None = self.__dict__.get("_engine")
        if engine is None:  # also after pickle and deepcopy
            offload, grads = bool(self.offload), self._host_grads
            engine = Engine(
                self._rule,
                self._public_name,
                offload=offload,
                host_grads=grads,
                processes=self._zero_group,
            )
            self._engine = engine
        return engine

    def _warn_of_lost_updates(self) -> None:
        self._has_warned = True
        if "_amp_initialized" in self.__dict__:  # O3 asks for this.
            return
        name, named = self._public_name, ParamNames(None, None).params(self.param_groups)
        advice = f"{name}(..., {self._asks_for_masters}) keeps masters"
        warn_of_lost_updates(self, name, named, advice)


def _naming_options(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that says which option an unknown one may stand for."""
    known = inspect.signature(constructor).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        unknown = [] if takes_any else [name for name in options if name not in known]
        if unknown:
            meant = did_you_mean(unknown[0], known)
            raise TypeError(f"{type(self).__name__}: there is no option {unknown[0]!r}{meant}")
        constructor(self, *args, **options)

    return __init__
