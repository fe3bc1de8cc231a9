"""The work of amp.initialize: check everything, then cast models and give optimizers masters."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp import amp
from apex_mp.amp._amp_state import _amp_state, warn_or_err
from apex_mp.amp._scale_loss.step_guard import guard_of
from apex_mp.amp.casts.casting import is_low
from apex_mp.amp.levels import masters
from apex_mp.amp.levels.masters import OptimizerWithMasters, check_group, give_masters
from apex_mp.amp.levels.options import Options
from apex_mp.amp.opt import OptimWrapper
from apex_mp.core import tensors
from apex_mp.core.tensors import FLOATING
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.fp16_utils.fp16util import cast_network
from apex_mp.grads import local_gradients
from apex_mp.masters import parallel_masters
from apex_mp.masters.attach import class_with
from apex_mp.masters.cast_parameters import warn_of_rounded_buffers
from apex_mp.masters.steps_of_masters import check_lists
from apex_mp.optimizers._hints import warn_of_eps
from apex_mp.saved.amp import MasterState


class Setup:
    """The arguments of `amp.initialize`. The constructor checks them and changes nothing.

    Args:
        models: A module or a list of modules.
        optimizers: An optimizer, a list of them, or None.
        options: The options of the level.
        dtype: The low precision of casts around functions.
        device_type: Where functions are cast; None: where the models are.
    """

    def __init__(
        self,
        models: Any,
        optimizers: Any,
        options: Options,
        *,
        dtype: torch.dtype,
        device_type: str | None,
    ) -> None:
        self._models: list[torch.nn.Module] = _listed(models, "model", _is_module)
        self._optimizers: list[Any] = []
        if optimizers is not None:
            self._optimizers = _listed(optimizers, "optimizer", _is_optimizer)
        self._options = options
        self._dtype = dtype
        self._device_type = device_type or _device_type_of(self._models)
        if self._device_type not in ("cpu", "cuda"):
            raise ValueError(
                f'amp.initialize: device_type is {device_type!r}; it must be "cpu" or "cuda"'
            )
        if self._device_type == "cuda" and not torch.backends.cudnn.enabled:
            raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True")
        _check_models(self._models)
        _check_scripted(self._models, options)
        if options.cast_model_type is not None:
            _check_castable(self._models)
        _check_optimizers(self._optimizers, masters=bool(options.master_weights))

    def apply(self, *, verbose: bool) -> None:
        """Cast models, give optimizers masters and switch on casts around functions."""
        # First, because only this may still raise, for functions that users have registered.
        handle = self._options.patch_torch_functions and amp.init(
            loss_scale=self._options.loss_scale,
            verbose=verbose,
            dtype=self._dtype,
            device_type=self._device_type,
        )
        stop_casts()
        _amp_state.handle = handle or None
        originals = _cast_models(self._models, self._options)
        new_state = MasterState({})
        for optimizer in self._optimizers:
            if not self._options.is_plain_float32:
                guard_of(optimizer)  # The first scale_loss may come in the closure of a step.
            if self._options.master_weights:
                # An optimizer for a later stage has masters that the model's hooks know.
                model_state = None if self._models else MasterState.known(optimizer)
                give_masters(optimizer, originals, model_state or new_state)
                continue
            optimizer._amp_initialized = True
            masters.attach_apex_names(optimizer)
            if self._options.cast_model_type is not None:
                _cast_state(optimizer)
            warn_of_eps("amp.initialize", optimizer)
        if self._options.saves_float32:
            for model in self._models:
                new_state.attach(model)
        _amp_state.models = [weakref.ref(model) for model in self._models]


def stop_casts() -> None:
    """Switch off the casts around functions of an earlier `initialize`."""
    handle, _amp_state.handle = _amp_state.handle, None
    if handle is not None:
        handle._deactivate()


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and hasattr(value, "step")


def _listed(value: Any, kind: str, fits: Any) -> list[Any]:
    items = [*value] if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not fits(item):
            raise TypeError(
                f"{kind}s must be either a single {kind} or a list of {kind}s. There is a "
                f"{type(item).__name__}."
            )
    return items


def _device_type_of(models: list[torch.nn.Module]) -> str:
    types = {param.device.type for model in models for param in model.parameters()}
    if not types:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if "cuda" in types else "cpu"


def _check_models(models: list[torch.nn.Module]) -> None:
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
    for model in models:
        if isinstance(model, wrappers):
            raise RuntimeError(
                f"Incoming model is an instance of {type(model)}. Parallel wrappers should only be "
                "applied to the model(s) AFTER \nthe model(s) have been returned from "
                "amp.initialize."
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        again = ""
        if MasterState.has(model):
            again = (
                "\nThis model went through amp.initialize before. Another optimizer for it, as for "
                "a second\nstage, goes there alone: amp.initialize([], optimizer), with the same "
                "opt_level."
            )
        for kind, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                if is_low(tensor.dtype):
                    warn_or_err(
                        f"Found {kind} {name} with type {tensor.dtype}, expected torch.float32.\n"
                        "When using amp.initialize, you do not need to call .half() on your "
                        "model\nbefore passing it, no matter what optimization level you choose."
                        + again
                    )


def _check_castable(models: list[torch.nn.Module]) -> None:
    """Refuse parameters whose memory does not hold their numbers, frozen ones too."""
    for model in models:
        for name, param in model.named_parameters():
            reason = tensors.not_castable(param)
            if reason is not None:
                raise TypeError(f"amp.initialize: the parameter {name} {reason}")


def _check_scripted(models: list[torch.nn.Module], options: Options) -> None:
    """Refuse modules of torch.jit where hooks are needed: on models, at O2 on all submodules."""
    for model in models:
        if options.saves_float32:
            hooked = dict(model.named_modules())
        else:
            hooked = {} if options.output_dtype is None else {"": model}
        for name, module in hooked.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"amp.initialize: {name or 'a model'} is a {type(module).__name__}, which has "
                    f"no hooks for the casts of opt_level {options.opt_level!r}; use O1, which "
                    "needs none"
                )


def _check_optimizers(optimizers: list[Any], *, masters: bool) -> None:
    once = "A given optimizer should only be passed through amp.initialize once."
    for optimizer in optimizers:
        if isinstance(optimizer, (FP16_Optimizer, OptimWrapper)):
            raise RuntimeError(
                f"An incoming optimizer is an instance of {type(optimizer)}, which scales losses "
                "by itself. The optimizer(s) passed to amp.initialize must be bare; pass the one "
                "inside."
            )
        if hasattr(optimizer, "_amp_initialized"):
            raise RuntimeError(once)
        if masters:
            _check_can_have_masters(optimizer)
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise RuntimeError(once)


def _check_can_have_masters(optimizer: Any) -> None:
    has_hooks = hasattr(optimizer, "_optimizer_step_post_hooks")
    if not isinstance(optimizer, torch.optim.Optimizer) or not has_hooks:
        raise TypeError(
            f"amp.initialize: an optimizer is a {type(optimizer).__name__}; for float32 "
            "masters it must be a torch.optim.Optimizer, whose steps have hooks"
        )
    check_lists("amp.initialize", optimizer, FLOATING)
    for number, group in enumerate(optimizer.param_groups):
        check_group(number, group["params"], group.get("param_names"))
    class_with(OptimizerWithMasters, type(optimizer))


def _cast_models(models: list[torch.nn.Module], options: Options) -> dict[Tensor, Tensor]:
    """Cast parameters, inputs and outputs; return the values of parameters before the cast."""
    originals: dict[Tensor, Tensor] = {}
    target, outputs = options.cast_model_type, options.output_dtype
    for model in models:
        if target is not None:
            for param in model.parameters():
                # Casts give a parameter new memory; this keeps the old one, with its own version.
                originals.setdefault(param, param.data)
            if options.keep_batchnorm_fp32:
                cast_network(model, target)
            else:
                # Not model.to(), which casts complex tensors too and drops their imaginary part.
                model._apply(lambda t: t.to(target) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
            warn_of_rounded_buffers("amp.initialize", model)
            model.register_forward_pre_hook(CastInputs(target), with_kwargs=True)
        if outputs is not None:
            # Runs before the hooks of the user, who expects outputs in the dtypes of before.
            model.register_forward_hook(CastOutputs(outputs), prepend=True)
    return originals


def _cast_state(optimizer: Any) -> None:
    """Cast the optimizer's existing state to the dtypes of its parameters."""
    if getattr(optimizer, "state", None):
        groups = optimizer.param_groups
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups = groups  # The very dicts that the user may hold.


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """A hook that casts floating inputs of a model."""

    dtype: torch.dtype

    def __call__(self, _: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            parallel = local_gradients.note_active()
            if parallel is not None:  # torch's own, which knows of no masters.
                parallel_masters.broadcast(parallel.module, parallel.process_group)
        args = tuple(_cast(value, self.dtype) for value in args)
        return args, {name: _cast(value, self.dtype) for name, value in kwargs.items()}


@dataclasses.dataclass(frozen=True)
class CastOutputs:
    """A hook that casts floating outputs of a model."""

    dtype: torch.dtype

    def __call__(self, _: torch.nn.Module, __: Any, outputs: Any) -> Any:
        return _cast(outputs, self.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if hasattr(value, "to") and not isinstance(value, (tuple, torch.nn.Module)):
        return value.to(dtype)  # A batch of the user's own class knows what of it to cast.
    return tensors.map_items(lambda item: _cast(item, dtype), value)
