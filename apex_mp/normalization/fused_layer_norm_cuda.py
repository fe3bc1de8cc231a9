"""The functions of apex's compiled module fused_layer_norm_cuda, on CUDA and on the CPU.

`mean` and `invvar` (1 / standard deviation, or 1 / root of the mean square) are vectors with an
element for each row, in float32 if the input is in half precision, as in apex. `memory_efficient`,
by which backward takes the output instead of the input, must be False.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_backward = torch.ops.aten.native_layer_norm_backward


def forward(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float,
) -> list[Tensor]:
    """Return `[output, mean, invvar]`."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def forward_affine(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> list[Tensor]:
    """Return `[output, mean, invvar]` with weight `gamma` and bias `beta`."""
    return _layer_norm(input, normalized_shape, gamma, beta, eps, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> list[Tensor]:
    """As `forward_affine`, with the output in the dtype of `gamma`."""
    return _layer_norm(input, normalized_shape, gamma, beta, eps, gamma.dtype)


def backward(
    dout: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input."""
    _refuse_output("backward", memory_efficient)
    shape, stats = [*normalized_shape], _by_row(input, normalized_shape, mean, invvar)
    x, grad = _wide(input, input), _wide(dout, input)
    mask = [True, False, False]
    grad_input: Tensor = _backward(grad, x, shape, *stats, None, None, mask)[0]
    return grad_input.to(input.dtype)


def backward_affine(
    dout: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Return the gradients of the input, of `gamma` and of `beta`, each in its dtype."""
    _refuse_output("backward_affine", memory_efficient)
    shape, stats = [*normalized_shape], _by_row(input, normalized_shape, mean, invvar)
    grad, x, weight, bias = (_wide(each, input) for each in (dout, input, gamma, beta))
    grads = _backward(grad, x, shape, *stats, weight, bias, [True, True, True])
    of = (input, gamma, beta)
    return [grad.to(each.dtype) for grad, each in zip(grads, of, strict=True)]


def rms_forward(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float,
) -> list[Tensor]:
    """Return `[output, invvar]`."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def rms_forward_affine(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    eps: float,
) -> list[Tensor]:
    """Return `[output, invvar]` with weight `gamma`."""
    return _rms_norm(input, normalized_shape, gamma, eps, input.dtype)


def rms_forward_affine_mixed_dtypes(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    eps: float,
) -> list[Tensor]:
    """As `rms_forward_affine`, with the output in the dtype of `gamma`."""
    return _rms_norm(input, normalized_shape, gamma, eps, gamma.dtype)


def rms_backward(
    dout: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input."""
    _refuse_output("rms_backward", memory_efficient)
    return _rms_backward(dout, invvar, input, normalized_shape, None)[0]


def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    gamma: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Return the gradients of the input and of `gamma`, each in its dtype."""
    _refuse_output("rms_backward_affine", memory_efficient)
    grad_input, by_element = _rms_backward(dout, invvar, input, normalized_shape, gamma)
    rows = [*range(input.dim() - len(normalized_shape))]
    return [grad_input, (by_element.sum(rows) if rows else by_element).to(gamma.dtype)]


def _layer_norm(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    weight, bias = (None if each is None else _wide(each, input) for each in (gamma, beta))
    x = _wide(input, input)
    output, mean, invvar = torch.native_layer_norm(x, [*shape], weight, bias, eps)
    return [output.to(dtype), mean.reshape(-1), invvar.reshape(-1)]


def _rms_norm(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    gamma: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    x = _wide(input, input)
    output = functional.rms_norm(x, [*shape], None if gamma is None else _wide(gamma, input), eps)
    invvar = (x.square().mean(_last(shape)) + eps).rsqrt()
    return [output.to(dtype), invvar.reshape(-1)]


def _rms_backward(
    dout: Tensor,
    invvar: Tensor,
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    gamma: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input, and that of `gamma` before rows are summed.

    With n = x / rms, y = n * gamma: dx = (g - n * mean(g * n)) / rms, where g = dy * gamma.
    """
    (factor,) = _by_row(input, shape, invvar)
    n, grad = _wide(input, input) * factor, _wide(dout, input)
    g = grad if gamma is None else grad * gamma
    grad_input = (g - n * (g * n).mean(_last(shape), keepdim=True)) * factor
    return grad_input.to(input.dtype), grad * n


def _wide(tensor: Tensor, input: Tensor) -> Tensor:  # noqa: A002
    """Return the tensor in the dtype of the computation: float32, or float64 if the input is."""
    return tensor.to(torch.promote_types(input.dtype, torch.float32)).contiguous()


def _last(shape: Sequence[int]) -> list[int]:
    return [*range(-len(shape), 0)]


def _by_row(
    input: Tensor,  # noqa: A002
    shape: Sequence[int],
    *vectors: Tensor,
) -> list[Tensor]:
    """Reshape vectors with an element for each row, so that they broadcast with the input."""
    rows = [*input.shape[: input.dim() - len(shape)]]
    return [each.reshape(rows + [1] * len(shape)) for each in vectors]


def _refuse_output(function: str, memory_efficient: bool) -> None:
    if memory_efficient:
        raise ValueError(
            f"fused_layer_norm_cuda.{function}: memory_efficient is {memory_efficient}; it must be "
            "False: give the input of the forward, not its output"
        )
