"""`.grad` of a parameter whose gradient is in host memory, by `offload="gradients"`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten


@dataclasses.dataclass(eq=False)
class Held:
    """A gradient in host memory.

    Attributes:
        name: The optimizer and the parameter, for messages.
        is_zero: Whether it was set to zero since backward has stored it or added to it.
    """

    name: str
    is_zero: bool = False

    def add(self, mark: _Mark, grad: Tensor) -> None:
        """Add what backward adds to `.grad`, which is `mark`."""
        raise NotImplementedError


class _Mark(Tensor):
    """A tensor without memory: backward can add to it, and it can be set to zero.

    Who reads it gets NaN, or 0 if it was set to zero. Any other write raises a RuntimeError.

    Attributes:
        held: The gradient that it stands for.
        number: Of the gradient, of all that the parameter has had.
        is_view: Whether it stands for a part of the gradient, or for its elements in another shape.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    held: Held
    number: int
    is_view: bool

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        held: Held,
        number: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        is_view: bool = False,
    ) -> _Mark:
        mark: _Mark = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=dtype or like.dtype,
            device=device or like.device,
        )
        mark.held, mark.number, mark.is_view = held, number, is_view
        return mark

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient in host memory: {[*self.shape]}, {self.dtype}, of {self.device}>"

    def tolist(self) -> Any:
        return self._read().tolist()

    def _read(self) -> Tensor:
        number = 0.0 if self.held.is_zero else math.nan
        return torch.full((), number, dtype=self.dtype, device=self.device).expand(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        do = _DOES.get(func)
        done = NotImplemented if do is None else do(*args, **kwargs)
        if done is not NotImplemented:
            return done
        mark = next(leaf for leaf in tree_leaves((args, kwargs)) if is_mark(leaf))
        if func._schema.is_mutable:
            raise RuntimeError(
                f'{mark.held.name}.grad is in host memory, since offload is "gradients", and '
                f"{func} does not work on it. It can be cleared and set to zero, and "
                "apex_mp.amp.GradScaler and its clip_grad_norm_ work with it; for anything else "
                "offload must be True or False"
            )
        args, kwargs = tree_map_only(_Mark, _Mark._read, (args, kwargs))
        result = func(*args, **kwargs)
        if any(each.alias_info for each in func._schema.returns) and isinstance(result, Tensor):
            return _Mark(result, mark.held, mark.number, is_view=True)
        return result


def _add(mark: Any, grad: Any, **options: Any) -> Any:
    is_one = isinstance(grad, Tensor) and not is_mark(grad) and grad.shape == mark.shape
    if options or not is_one or not is_mark(mark) or mark.is_view:
        return NotImplemented
    mark.held.add(mark, grad)
    return mark


def _zero(mark: _Mark) -> Any:
    if mark.is_view:
        return NotImplemented
    mark.held.is_zero = True
    return mark


def _foreach_zero(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _cast(mark: _Mark, *, dtype: Any = None, device: Any = None, **_: Any) -> _Mark:
    """Return the mark of the same gradient for a model that is cast or moved."""
    return _Mark(mark, mark.held, mark.number, dtype=dtype, device=device, is_view=mark.is_view)


# What can be done to a mark; NotImplemented: not with these arguments.
_DOES: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: _add,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _foreach_zero,
    _aten._to_copy.default: _cast,
    _aten.detach.default: lambda mark: mark,
}


def mark_like(param: Tensor, held: Held | None = None, number: int = 0) -> Tensor:
    """Return a `.grad` that stands for a gradient in host memory."""
    return _Mark(param, held or Held("a parameter"), number)


def is_mark(grad: Any) -> bool:
    """Return whether a `.grad` is such a mark."""
    return isinstance(grad, _Mark)


def grad_here(param: Tensor) -> Tensor | None:
    """Return a parameter's gradient; None if there is none, or it is elsewhere."""
    grad = param.grad
    return None if is_mark(grad) else grad


def refuse_offloaded(caller: str, optimizer: Any) -> None:
    """Raise if an optimizer takes gradients out of `.grad`, where `caller` needs them."""
    if getattr(optimizer, "offload", False) == "gradients":
        raise ValueError(
            f'{caller}: offload of this {type(optimizer).__name__} is "gradients", so that they '
            f"are not in .grad, where {caller} works on them; it must be True or False. "
            "apex_mp.amp.GradScaler's step and clip_grad_norm_ work with it"
        )
