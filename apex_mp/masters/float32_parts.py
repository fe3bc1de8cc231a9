"""keep_fp32: parts of a half-precision model stay in float32; their inputs and outputs are cast."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.loss import _Loss

from apex_mp.core.tensors import map_tensors
from apex_mp.masters.masters import LOW_PRECISION


class Float32Part(nn.Module):
    """A base class that `keep_fp32` adds in front of the class of a part.

    Hooks and wrappers would not do: so keys of the state_dict and names of parameters stay the
    same, and replicas, copies and pickles are parts too.
    """

    # The dtype of float32 outputs; None: that of the first low-precision input.
    _part_outputs: torch.dtype | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the part with low-precision tensors in float32, and cast what it returns."""
        low: list[torch.dtype] = []

        def widened(tensor: Tensor) -> Tensor:
            if tensor.dtype not in LOW_PRECISION:
                return tensor
            low.append(tensor.dtype)
            return tensor.float()

        args, kwargs = map_tensors(widened, args), map_tensors(widened, kwargs)
        result = super().forward(*args, **kwargs)
        dtype = self._part_outputs or next(iter(low), None)
        if dtype is None:
            return result
        return map_tensors(lambda t: t.to(dtype) if t.dtype is torch.float32 else t, result)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the part, but keep its dtype; half(), to(), cuda() and the like call this."""

        def kept(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            low = result.dtype in LOW_PRECISION and result.dtype != tensor.dtype
            return tensor.to(result.device) if low else result

        return super()._apply(kept, recurse)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the original class, which can be imported; loading derives this one again."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, (type(self).__mro__[2],), *reduced[2:]


@functools.cache
def _with_float32(cls: Any) -> Any:
    """Return the class of a part that was of class `cls`."""
    return type(cls.__name__, (Float32Part, cls), {"__module__": cls.__module__})


def _blank(cls: Any) -> Any:
    kept = _with_float32(cls)
    return kept.__new__(kept)


# Models pickled by earlier builds name `_blank` by this module's old path.
for earlier in ("apex_mp._float32_parts", "apex_mp.core.float32_parts"):
    sys.modules[earlier] = sys.modules[__name__]


def keep_fp32(
    module: nn.Module,
    names_or_types: str | type[nn.Module] | Iterable[str | type[nn.Module]],
    *,
    outputs: torch.dtype | None = None,
) -> nn.Module:
    """Keep parts of a model in float32, in place, whatever casts the model: `half()`, O2 and so on.

        model = keep_fp32(model, ["head", torch.nn.LayerNorm]).half()

    A part gets float16 and bfloat16 tensors as float32, in lists, tuples and dicts too; integers
    and float64 stay as they are. What it returns goes back to the dtype of the first float16 or
    bfloat16 tensor that it got, so that the layers after it work; if it got none, as an embedding,
    outputs stay. A loss (`torch.nn.modules.loss`) returns float32: in float16 it could overflow. At
    the end of a model, ask for float32 by `outputs`. Keys of the state_dict and names of parameters
    are the same as before.

    Only parameters, inputs and outputs are cast. Inside `torch.autocast` and after `amp.init()`
    functions cast their own arguments, within a part too.

    Args:
        module: A model in any precision. Parameters that are halved already become float32.
        names_or_types: Names as in `named_modules()`, or classes of modules; one, or several.
        outputs: The dtype of the float32 outputs of these parts [None: as said above].

    Returns:
        `module`.

    Raises:
        TypeError: An argument is of a wrong type, or a part is a module of torch.jit.
        ValueError: There is no part of that name or class, it is a lazy module that has not run, it
            shares a parameter with a part that is not named, or `outputs` is not floating. Nothing
            is changed by an error.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"keep_fp32: module is a {type(module).__name__}; it must be a Module")
    if outputs is not None and not getattr(outputs, "is_floating_point", False):
        raise ValueError(f"keep_fp32: outputs is {outputs!r}; it must be a floating dtype or None")
    keep_parts("keep_fp32", "names_or_types", module, names_or_types, outputs)
    return module


def keep_parts(
    who: str,
    argument: str,
    module: nn.Module,
    names_or_types: Any,
    outputs: torch.dtype | None = None,
) -> None:
    """Do what `keep_fp32` does.

    Args:
        who: The public function, for messages.
        argument: Its name for `names_or_types`.
        module: As there.
        names_or_types: As there.
        outputs: As there.
    """
    parts = _parts_of(who, argument, module, names_or_types)
    check_parts(who, module, parts)
    for part in parts.values():
        for each in part.modules():
            if not isinstance(each, Float32Part):
                cls: Any = type(each)
                each.__class__ = _with_float32(cls)
                each._part_outputs = torch.float32 if isinstance(each, _Loss) else None  # type: ignore[assignment]
        if outputs is not None:
            part._part_outputs = outputs  # type: ignore[assignment]
        part._apply(lambda t: t.float() if t.dtype in LOW_PRECISION else t)  # type: ignore[no-untyped-call]


def _parts_of(
    who: str, argument: str, module: nn.Module, names_or_types: Any
) -> dict[str, nn.Module]:
    """Return the modules that are named, by name."""
    named = dict(module.named_modules())
    one = isinstance(names_or_types, (str, type)) or not isinstance(names_or_types, Iterable)
    parts: dict[str, nn.Module] = {}
    for wanted in [names_or_types] if one else names_or_types:
        if isinstance(wanted, str):
            found = {wanted: named[wanted]} if wanted in named else {}
            there = [name for name in named if name]
        elif isinstance(wanted, type) and issubclass(wanted, nn.Module):
            found = {name: each for name, each in named.items() if isinstance(each, wanted)}
            there = sorted({type(each).__name__ for each in named.values()})
        else:
            raise TypeError(
                f"{who}: {argument} has {wanted!r}; it must be the name of a module or a class of "
                "modules"
            )
        if not found:
            what = repr(wanted) if isinstance(wanted, str) else wanted.__name__
            raise ValueError(f"{who}: there is no {what} in the model; there are {there}")
        parts |= found
    if not parts:
        raise ValueError(f"{who}: {argument} is empty; name at least one part")
    return parts


def check_parts(who: str, module: nn.Module, parts: dict[str, nn.Module]) -> None:
    """Refuse parts that cannot be kept, and parameters that another part uses as well."""
    inside = {each for part in parts.values() for each in part.modules()}
    for name, part in parts.items():
        for each in part.modules():
            if isinstance(each, torch.jit.ScriptModule):
                raise TypeError(f"{who}: {name} is a module of torch.jit; name it before that")
            if isinstance(each, LazyModuleMixin):
                raise ValueError(f"{who}: {name} is lazy; run the model once before")
    kept = {
        id(param): f"{name}.{own}"
        for name, part in parts.items()
        for own, param in part.named_parameters()
    }
    for name, each in module.named_modules():
        for own, param in each.named_parameters(recurse=False):
            if id(param) in kept and each not in inside and not isinstance(each, Float32Part):
                raise ValueError(
                    f"{who}: {name}.{own} is a parameter of a part that is to stay in float32 "
                    f"as well; name {name} too"
                )
