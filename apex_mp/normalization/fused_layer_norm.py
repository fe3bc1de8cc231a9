"""The modules and functions of apex.normalization.fused_layer_norm, over torch's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from apex_mp.normalization._functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)
from apex_mp.normalization._norms import Shape, as_shape, is_shape, layer_norm, rms_norm


def either_order(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function `(input, weight, [bias,] normalized_shape, ...)` take the shape second too.

    The type of the second argument decides: a shape is a number or a sequence of numbers, a
    weight is a tensor.

    The result raises a TypeError if a weight is not a tensor, the shape is not a shape, or one is
    given twice.
    """
    names = [*inspect.signature(function).parameters]
    weights = names[1 : names.index("normalized_shape")]
    shape_second = ["input", "normalized_shape", *weights, *names[len(weights) + 2 :]]
    wish = " or ".join(f"({', '.join(each[: len(weights) + 2])})" for each in (shape_second, names))

    def refuse(name: str, said: str, wanted: str) -> NoReturn:
        raise TypeError(f"{function.__name__}: {name} is {said}; it must be {wanted}: {wish}")

    @functools.wraps(function)
    def taking_both(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > len(names):
            return function(*args)  # Python says how many there may be.
        order = shape_second if len(args) > 1 and is_shape(args[1]) else names
        given = dict(zip(order, args, strict=False))
        for name in given.keys() & kwargs.keys():
            refuse(name, "given by place and by name", "given once")
        given.update(kwargs)
        for name in weights:
            if name in given and not isinstance(given[name], Tensor):
                refuse(name, repr(given[name]), "a tensor")
        shape = given.get("normalized_shape", ())
        if not is_shape(shape):
            tensor = isinstance(shape, Tensor)
            said = f"a tensor of shape {[*shape.shape]}" if tensor else repr(shape)
            refuse("normalized_shape", said, "a number or a sequence of numbers")
        return function(**given)

    return taking_both


__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

# The default of the functions, as in apex; that of its modules is 1e-5.
_EPS = 1e-6


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with the arguments of apex, for half input and float32 weights too.

        norm = FusedLayerNorm(768)

    The output has the dtype of the input, or float32 if amp or torch.autocast casts.

    Args:
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the variance [1e-5].
        elementwise_affine: Have a weight and a bias [True].
        memory_efficient: Accepted, and has no effect: torch keeps only the input and two numbers a
            row for backward [False].
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__([*as_shape(normalized_shape)], eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise `[..., *normalized_shape]`."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with the arguments and the eps of apex; dtypes as of `FusedLayerNorm`.

        norm = FusedRMSNorm(768)

    Args:
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the mean square; None is `torch.finfo(dtype).eps`, as in torch [1e-5].
        elementwise_affine: Have a weight [True].
        memory_efficient: Accepted, and has no effect [False].
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__([*as_shape(normalized_shape)], eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise `[..., *normalized_shape]`."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of the weight.

    Args:
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the variance [1e-5].
        memory_efficient: Accepted, and has no effect [False].
        elementwise_affine: Must be True [True].

    Raises:
        RuntimeError: `elementwise_affine` is False.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        _demand_weights(self, elementwise_affine)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise `[..., *normalized_shape]`."""
        shape, eps = self.normalized_shape, self.eps
        return layer_norm(input, shape, self.weight, self.bias, eps, like="weight")


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` whose output has the dtype of the weight; see `MixedFusedLayerNorm`."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        _demand_weights(self, elementwise_affine)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise `[..., *normalized_shape]`."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps, like="weight")


def _demand_weights(module: torch.nn.Module, elementwise_affine: bool) -> None:
    if not elementwise_affine:
        name = type(module).__name__
        raise RuntimeError(
            f"{name}: elementwise_affine is {elementwise_affine}; it must be True, as the output "
            f"has the dtype of the weight. {name.removeprefix('Mixed')} can do without"
        )


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = _EPS,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalise over the last dimensions; `eps` is 1e-6 here, unlike that of the module.

    Args:
        input: `[..., *normalized_shape]`, of any floating dtype.
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the variance [1e-6].
        memory_efficient: Accepted, and has no effect [False].

    Returns:
        Of the input's shape and dtype.
    """
    return layer_norm(input, as_shape(normalized_shape), None, None, eps)


@either_order
def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = _EPS,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalise over the last dimensions, then multiply by `weight` and add `bias`.

    Also `(input, normalized_shape, weight, bias, ...)`, as until 2021.

    Args:
        input: `[..., *normalized_shape]`, of any floating dtype.
        weight: Of shape `normalized_shape`.
        bias: Of shape `normalized_shape`.
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the variance [1e-6].
        memory_efficient: Accepted, and has no effect [False].

    Returns:
        Of the input's shape and dtype.
    """
    return layer_norm(input, as_shape(normalized_shape), weight, bias, eps)


@either_order
def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = _EPS,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the norm in the weight's dtype; arguments as of `fused_layer_norm_affine`."""
    return layer_norm(input, as_shape(normalized_shape), weight, bias, eps, like="weight")


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = _EPS,
    memory_efficient: bool = False,
) -> Tensor:
    """Divide by `sqrt(mean(input**2) + eps)`, the mean over the last dimensions.

    Args:
        input: `[..., *normalized_shape]`, of any floating dtype.
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the mean square [1e-6].
        memory_efficient: Accepted, and has no effect [False].

    Returns:
        Of the input's shape and dtype.
    """
    return rms_norm(input, as_shape(normalized_shape), None, eps)


@either_order
def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = _EPS,
    memory_efficient: bool = False,
) -> Tensor:
    """Return `fused_rms_norm` multiplied by `weight`; the shape may also stand second.

    Args:
        input: `[..., *normalized_shape]`, of any floating dtype.
        weight: Of shape `normalized_shape`.
        normalized_shape: The last dimensions of the input: a number or a sequence.
        eps: Added to the mean square [1e-6].
        memory_efficient: Accepted, and has no effect [False].
    """
    return rms_norm(input, as_shape(normalized_shape), weight, eps)


@either_order
def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = _EPS,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the norm in the weight's dtype; arguments as of `fused_rms_norm_affine`."""
    return rms_norm(input, as_shape(normalized_shape), weight, eps, like="weight")


def manual_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the RMS norm in the dtype that apex gave it on a CPU.

    That is half precision if the weight is, else float32, or float64 with float64 tensors.

    Args:
        input: `[..., *normalized_shape]`, of any floating dtype.
        normalized_shape: The last dimensions of the input: a number or a sequence.
        weight: Of shape `normalized_shape`, or None.
        eps: Added to the mean square.
    """
    if weight is None:
        dtype = torch.promote_types(input.dtype, torch.float32)
        return rms_norm(input.to(dtype), as_shape(normalized_shape), None, eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        return rms_norm(input, as_shape(normalized_shape), weight, eps, like="weight")
    dtype = torch.promote_types(input.dtype, weight.dtype)
    return rms_norm(input.to(dtype), as_shape(normalized_shape), weight, eps)
