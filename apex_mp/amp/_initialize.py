"""The work of amp.initialize: check everything, then cast models and give optimizers masters."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp import amp
from apex_mp.amp._amp_state import OptLevel, _amp_state, warn_or_err
from apex_mp.amp._masters import MasterState, OptimizerMasters
from apex_mp.amp.casting import is_low, map_tensors
from apex_mp.fp16_utils import FP16_Optimizer, convert_network


def prepare(
    models: Any,
    optimizers: Any,
    options: OptLevel,
    *,
    dtype: torch.dtype,
    device_type: str | None,
    verbosity: int,
) -> Any:
    """Prepare models and optimizers; return what `initialize` returns."""
    model_list = _listed(models, "models", "model", torch.nn.Module)
    optimizer_list = (
        [] if optimizers is None else _listed(optimizers, "optimizers", "optimizer", None)
    )
    device_type = device_type or _device_type_of(model_list)
    _check_models(model_list)
    _check_optimizers(optimizer_list)
    if device_type == "cuda" and not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True")
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()  # of another level, before
    if options.patch_torch_functions:
        _amp_state.handle = amp.init(
            loss_scale=options.loss_scale,
            verbose=verbosity == 2,
            dtype=dtype,
            device_type=device_type,
        )
    originals = _cast_models(model_list, options)
    masters = []
    for optimizer in optimizer_list:
        optimizer._amp_initialized = True
        if options.master_weights:
            masters.append(OptimizerMasters(optimizer, originals))
    if masters:
        for model in model_list:
            MasterState(masters).attach(model)
    _amp_state.models = model_list
    if optimizers is None:
        return models
    return models, optimizers


def _listed(value: Any, name: str, kind: str, cls: type | None) -> list[Any]:
    items = [*value] if isinstance(value, (list, tuple)) else [value]
    for item in items:
        fits = isinstance(item, cls) if cls is not None else hasattr(item, "param_groups")
        if not fits:
            raise TypeError(
                f"{name} must be either a single {kind} or a list of {kind}s. There is a "
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
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in named:
                if is_low(tensor.dtype):
                    warn_or_err(
                        f"Found {kind} {name} with dtype {tensor.dtype}, expected torch.float32. "
                        "Do not call .half() on a model before amp.initialize."
                    )


def _check_optimizers(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "amp.initialize was given an FP16_Optimizer, which scales and keeps masters by "
                "itself; pass the optimizer inside"
            )
        if hasattr(optimizer, "_amp_initialized"):
            raise RuntimeError(
                "A given optimizer should only be passed through amp.initialize once."
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")


def _cast_models(models: list[torch.nn.Module], options: OptLevel) -> dict[Tensor, Tensor]:
    """Cast parameters, inputs and outputs; return the float32 values that masters start from."""
    originals: dict[Tensor, Tensor] = {}
    target = options.cast_model_type
    for model in models:
        if target is not None:
            if options.master_weights:
                for param in model.parameters():
                    if param.dtype is torch.float32 and is_low(target):
                        originals[param] = param.detach().clone()
            if options.keep_batchnorm_fp32:
                convert_network(model, target)
            else:
                model.to(target)
            model.register_forward_pre_hook(CastInputs(target), with_kwargs=True, prepend=True)
        outputs = options.cast_model_outputs or (torch.float32 if target is not None else None)
        if outputs is not None:
            model.register_forward_hook(CastOutputs(outputs))
    return originals


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """A hook that casts floating inputs of a model."""

    dtype: torch.dtype

    def __call__(self, _: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, self.dtype), _cast(kwargs, self.dtype)


@dataclasses.dataclass(frozen=True)
class CastOutputs:
    """A hook that casts floating outputs of a model."""

    dtype: torch.dtype

    def __call__(self, _: torch.nn.Module, __: Any, outputs: Any) -> Any:
        return _cast(outputs, self.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
