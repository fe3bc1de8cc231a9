"""amp.fp16_compute: a module that keeps float32 parameters and computes with casts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex_mp.core.tensors import map_tensors
from apex_mp.fp16_utils.fp16util import hide_prefix
from apex_mp.masters.float32_parts import Float32Part


class LowPrecisionCompute(nn.Module):
    """Calls a module with casts of its parameters, buffers and inputs; see `fp16_compute`.

    Attributes of the module are attributes of this: `compute.weight` is `compute.module.weight`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        hide_prefix(self, "module.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating outputs are in low precision."""
        originals = _tensors_to_cast(self.module)
        casts = {name: self._cast(tensor) for name, tensor in originals.items()}
        buffers = {
            name: (casts[name], casts[name]._version)
            for name, tensor in originals.items()
            if not isinstance(tensor, nn.Parameter)
        }
        args, kwargs = map_tensors(self._cast, args), map_tensors(self._cast, kwargs)
        with _flat_weights_kept(self.module):
            result = torch.func.functional_call(self.module, casts, args, kwargs)
        for name, (cast, version) in buffers.items():
            _write_back(originals[name], cast, version, casts[name])
        return result

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # Not there yet: a copy is being made.
                raise
            return getattr(self.module, name)


def _tensors_to_cast(module: nn.Module) -> dict[str, Tensor]:
    """Return floating parameters and buffers, except those of parts that cast by themselves."""

    def named(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(module, (_BatchNorm, LowPrecisionCompute, Float32Part)):
            return
        for own in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            yield from ((prefix + name, tensor) for name, tensor in own)
        for name, child in module.named_children():
            yield from named(child, f"{prefix}{name}.")

    # One name is enough for a weight that several modules share.
    names = {tensor: name for name, tensor in named(module, "") if tensor.is_floating_point()}
    return {name: tensor for tensor, name in names.items()}


@torch.no_grad()
def _write_back(buffer: Tensor, cast: Tensor, version: int, after: Tensor) -> None:
    """Write to a buffer what a forward has written to its cast, or assigned in its place."""
    # Compiled code does not keep versions.
    if after is cast and cast._version == version and not torch.compiler.is_compiling():
        return
    if after is not buffer:
        buffer.copy_(torch.where(after == buffer.to(after.dtype), buffer, after))


@contextlib.contextmanager
def _flat_weights_kept(module: nn.Module) -> Iterator[None]:
    """Restore the weight lists of recurrent layers when the block ends; they hold casts within."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    before = [(layer._flat_weights, layer._flat_weight_refs) for layer in layers]
    try:
        yield
    finally:
        for layer, (weights, references) in zip(layers, before, strict=True):
            layer._flat_weights, layer._flat_weight_refs = weights, references


def fp16_compute(module: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Module:
    """Return a module with the same float32 parameters, whose forward runs on casts of them.

    Use it for a part of a model that computes in low precision while optimizer and checkpoints see
    float32. It needs neither `amp.init()` nor `initialize`. Batch norms keep float32 parameters,
    and so do parts named by `apex_mp.keep_fp32`, which compute in float32.

    Args:
        module: A module with float32 parameters; it is used, not copied. Its state_dict keys stay.
        dtype: torch.float16 or torch.bfloat16 [torch.float16].

    Raises:
        TypeError: `module` is not a module.
        ValueError: `dtype` is neither torch.float16 nor torch.bfloat16.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fp16_compute: module is a {type(module).__name__}; it must be a Module")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"fp16_compute: dtype is {dtype}; it must be torch.float16 or torch.bfloat16"
        )
    return LowPrecisionCompute(module, dtype)
