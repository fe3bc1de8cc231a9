"""cast_parameters: a model for training on 16-bit weights; buffers that half() rounds are named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from apex_mp.core.float32_parts import Float32Part, keep_parts
from apex_mp.core.log import counted, warn
from apex_mp.core.masters import LOW_PRECISION


def cast_parameters(
    model: nn.Module,
    dtype: torch.dtype = torch.float16,
    *,
    keep: str | type[nn.Module] | Iterable[str | type[nn.Module]] | None = None,
) -> list[str]:
    """Cast a model's parameters to 16 bits in place, for training; buffers and norms are kept.

        kept = cast_parameters(model)
        optimizer = FusedAdam(model.parameters(), master_weights=True)

    `model.half()` casts buffers too, which have no masters: running statistics, the frequencies
    of a rotary embedding, and other tables stay rounded from then on. A buffer that is added to
    16-bit activations makes them float32, and the next layer names both dtypes in an error: cast
    that one by hand, `model.position.table = model.position.table.half()`.

    Batch and instance norms take 16-bit inputs as they are. Other parts that are kept get them as
    float32, and return what they got, as with `keep_fp32`.

    Args:
        model: In float32; changed in place, while parameters stay the same objects. What an earlier
            `half()` has rounded stays so.
        dtype: torch.float16 or torch.bfloat16 [torch.float16].
        keep: Modules to keep in float32 in addition to batch and instance norms: names as in
            `named_modules()`, or classes; one, or several; () for none [None: modules inside of the
            model, without children, whose class is named ...Norm].

    Returns:
        The names of the floating parameters and buffers that were kept, as in `state_dict()`.

    Raises:
        TypeError: An argument is of a wrong type, or a part is a module of torch.jit.
        ValueError: `dtype` is neither; or `keep` names what is not there, or what shares a
            parameter with the rest. Nothing is changed by an error.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cast_parameters: model is a {type(model).__name__}; it must be a Module")
    if dtype not in LOW_PRECISION:
        raise ValueError(
            f"cast_parameters: dtype is {dtype}; it must be torch.float16 or torch.bfloat16"
        )
    parts = [*_norms(model)] if keep is None else keep
    if parts not in ([], ()):
        keep_parts("cast_parameters", "keep", model, parts)
    kept = {id(tensor) for tensor in chain(model.buffers(), _kept_parameters(model))}
    model._apply(  # type: ignore[no-untyped-call]
        lambda t: t.to(dtype) if t.is_floating_point() and id(t) not in kept else t
    )
    named = chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if id(tensor) in kept and tensor.is_floating_point()]


def _norms(model: nn.Module) -> Iterator[str]:
    """Yield the names of norms that do not take 16-bit inputs with float32 parameters."""
    for name, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm") and not isinstance(module, _NormBase)
        if is_norm and name and next(module.children(), None) is None:
            yield name


def _kept_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters that stay, and their gradients."""
    for module in model.modules():
        if isinstance(module, (_NormBase, Float32Part)):
            for param in module.parameters():
                yield param
                if param.grad is not None:
                    yield param.grad


def warn_of_rounded_buffers(who: str, model: nn.Module) -> bool:
    """Warn of buffers that 16 bits round; return whether there are any.

    Args:
        who: Called with the model, for the message.
        model: In 16 bits, or in part.
    """
    names = [
        name
        for owner, module in model.named_modules()
        for name in _rounded(f"{owner}." if owner else "", module)
    ]
    if names:
        more = f" and {counted(len(names) - 1, 'more buffer')}" if len(names) > 1 else ""
        warn(
            f"{who}: the 16-bit buffer {names[0]}{more} of the model may be rounded, and buffers "
            "have no masters. Pass their modules to apex_mp.keep_fp32 before the cast, or cast "
            "with apex_mp.cast_parameters(model) instead of half()",
            "buffers-in-16-bits",
        )
    return bool(names)


def _rounded(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the names of running statistics, and of other 16-bit buffers that hold fractions.

    Whole numbers, as in masks, count as exact, although above 256 bfloat16 may round them, too.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype not in LOW_PRECISION or buffer.is_meta:
            continue
        is_running = isinstance(module, _NormBase)
        if is_running or bool((buffer != buffer.round()).any()):
            yield prefix + name
