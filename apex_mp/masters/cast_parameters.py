"""cast_parameters: a model for training on 16-bit weights; buffers that half() rounds are named."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from apex_mp.core import tensors
from apex_mp.core.log import counted, warn
from apex_mp.masters.float32_parts import Float32Part, check_parts, keep_parts
from apex_mp.masters.masters import LOW_PRECISION


def cast_parameters(
    model: nn.Module,
    dtype: torch.dtype = torch.float16,
    *,
    keep: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
) -> list[str]:
    """Cast a model's parameters to 16 bits in place, for training; keep buffers and batch norms.

        kept = cast_parameters(model)
        optimizer = FusedAdam(model.parameters(), master_weights=True)

    `model.half()` casts buffers too, which have no masters: running statistics, the frequencies
    of a rotary embedding, and other tables stay rounded from then on. A buffer that is added to
    16-bit activations makes them float32, and the next layer names both dtypes in an error: cast
    that one by hand, `model.position.table = model.position.table.half()`.

    Batch and instance norms take 16-bit inputs as they are. Layer norms are cast like other
    modules: they compute in float32 anyway, and their parameters have masters. Buffers with which a
    weight is computed in each forward, as by `spectral_norm` and `orthogonal`, are cast like it.

    Args:
        model: Changed in place, while parameters stay the same objects.
        dtype: torch.float16 or torch.bfloat16 [torch.float16].
        keep: Modules to keep in float32 in addition to batch and instance norms, as by
            `keep_fp32`: names as in `named_modules()`, or classes; one, or several [()].

    Returns:
        The names of the parameters and buffers that are float32, as in `state_dict()`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: `dtype` is neither; or `keep` names what is not there; or what is kept is lazy,
            or shares a parameter with the rest. Nothing is changed by an error.

    Warns:
        RuntimeWarning: A buffer has 16 bits already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cast_parameters: model is a {type(model).__name__}; it must be a Module")
    if dtype not in LOW_PRECISION:
        raise ValueError(
            f"cast_parameters: dtype is {dtype}; it must be torch.float16 or torch.bfloat16"
        )
    norms: dict[str, nn.Module] = {
        name: each for name, each in model.named_modules() if isinstance(each, _NormBase)
    }
    check_parts("cast_parameters", model, norms)
    if keep not in ([], ()):
        keep_parts("cast_parameters", "keep", model, keep)
    warn_of_rounded_buffers("cast_parameters", model)
    for norm in norms.values():
        norm.float()
    kept = {id(param) for param in _kept_parameters(model)}
    of_weights = {id(buffer) for weight, buffer in _of_weights(model) if id(weight) not in kept}
    kept |= {id(buffer) for buffer in model.buffers()} - of_weights
    model._apply(  # type: ignore[no-untyped-call]
        lambda t: t.to(dtype) if t.is_floating_point() and id(t) not in kept else t
    )
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return [name for name, tensor in named if tensor.dtype is torch.float32]


def _kept_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters that stay, and their gradients."""
    for module in model.modules():
        if isinstance(module, (_NormBase, Float32Part)):
            for param in module.parameters():
                yield param
                if param.grad is not None:
                    yield param.grad


def _of_weights(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield buffers that each forward multiplies with a weight, each after that weight."""
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            yield from ((next(module.parameters()), buffer) for buffer in module.buffers())
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                weight = getattr(module, f"{hook.name}_orig")
                yield from ((weight, getattr(module, f"{hook.name}_{each}")) for each in "uv")


# Models for which the warning was given: they may come again with a scaler.
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_rounded_buffers(who: str, model: nn.Module) -> None:
    """Warn of buffers that 16 bits round, once for a model.

    Args:
        who: Called with the model, for the message.
        model: In 16 bits, or in part.
    """
    if model in _warned:
        return
    of_weights = {id(buffer) for _, buffer in _of_weights(model)}
    names = [
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if id(buffer) not in of_weights and _is_rounded(module, buffer)
    ]
    if names:
        _warned.add(model)
        more = f" and {counted(len(names) - 1, 'more buffer')}" if len(names) > 1 else ""
        warn(
            f"{who}: the 16-bit buffer {names[0]}{more} of the model may be rounded, and buffers "
            "have no masters. Pass their modules to apex_mp.keep_fp32 before the cast, or cast "
            "with apex_mp.cast_parameters(model) instead of half()",
            "buffers-in-16-bits",
        )


def _is_rounded(module: nn.Module, buffer: Tensor) -> bool:
    """Return whether a module's buffer is a running statistic, or holds fractions, in 16 bits.

    Whole numbers, as in masks, count as exact, although above 256 bfloat16 may round them, too.
    """
    if buffer.dtype not in LOW_PRECISION or tensors.not_readable(buffer) is not None:
        return False
    return isinstance(module, _NormBase) or bool((buffer != buffer.round()).any())
