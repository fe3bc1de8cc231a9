"""Typed functions for the C++ operators: the only file that says `torch.ops.apex_mp`.

Every operator takes whole lists, checks all arguments before it writes anything, and raises a
RuntimeError whose sentence names the operator, the list, the index, the value and the wish. Lists
hold dense tensors on one device, of float16, bfloat16, float32 or float64 in any mix; tensors at
one index have as many elements and lie in memory in the same order. Empty lists and tensors are
fine.

Numbers (`inv_scale`, `a`, `b`) are tensors of one float32 or float64 element, on the device
of the lists or on the CPU. `found_inf` is a tensor of one float32 element on that device, as in
`torch.amp.GradScaler`: an operator sets it to 1 if it met inf or NaN, and never clears it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_required_storage_length
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree

from apex_mp.loss_scale import Rule


def copy_written_arguments(operator: OpOverload) -> None:
    """Make `operator` write to copies when it is traced."""
    arguments = operator._schema.arguments

    @operator.py_impl(FunctionalTensorMode)
    def trace(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> None:
        names = [argument.name for argument in arguments]
        call = dict(zip(names, args, strict=False)) | kwargs
        written = [call.get(argument.name) for argument in arguments if argument.is_write]
        with mode:
            targets = [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]
            copies = {id(target): _copy(target) for target in targets}
        call = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), call)
        mode.__torch_dispatch__(operator, (), (), call)
        with mode:
            for target in targets:
                target.copy_(copies[id(target)])


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with equal strides, in a memory that is larger than needed.

    Inductor would replace a plain clone by the tensor itself, offset included.
    """
    length = compute_required_storage_length(tensor.size(), tensor.stride(), 0)
    return tensor.new_empty(length + 1).as_strided(tensor.size(), tensor.stride()).copy_(tensor)


for _name in (
    "check_",
    "unscale_",
    "axpby_",
    "exponents_",
    "update_scale_",
):
    copy_written_arguments(getattr(torch.ops.apex_mp, _name).default)

EXPONENT_BINS = 256  # kExponentBins of csrc/math/exponent.h


def check_(
    grads: Sequence[Tensor], places: Sequence[int], found_inf: Tensor, sum_sq: Tensor
) -> None:
    """Test gradients for inf and NaN and sum their squares, in one pass that only reads them.

    Args:
        grads: Gradients, any floating dtypes.
        places: For each gradient the element of `sum_sq` that becomes its sum; they increase.
        found_inf: One float32 element, set to 1 if a gradient holds inf or NaN.
        sum_sq: float64 vector; written. Each sum has a fixed order, so that it is the same whatever
            the number of threads. Squares of finite gradients do not overflow.
    """
    torch.ops.apex_mp.check_(grads, places, found_inf, sum_sq)


def unscale_(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    places: Sequence[int] = (),
    sum_sq: Tensor | None = None,
) -> None:
    """Write `src[i] * inv_scale` to `dst[i]`; inf and NaN are passed on.

    Args:
        src: Scaled gradients.
        dst: Where they go, in their own dtypes; may be the list `src` itself.
        inv_scale: 1 / loss scale.
        found_inf: One float32 element, set to 1 if `src` holds inf or NaN.
        places: As of `check_`, with `sum_sq`.
        sum_sq: float64 vector; `sum_sq[places[i]]` becomes the sum of squares of `dst[i]` as it is
            written, as of `check_` [None: not measured].
    """
    torch.ops.apex_mp.unscale_(src, dst, inv_scale, found_inf, places, sum_sq)


def axpby_(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    out: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    found_inf: Tensor,
    *,
    tested: int = -1,
) -> None:
    """Write `a * x[i] + b * y[i]` to `out[i]`, which may be `x[i]` or `y[i]`.

    Args:
        x: First operands.
        y: Second operands.
        out: Results, in their own dtypes.
        a: Factor of `x`.
        b: Factor of `y`.
        found_inf: One float32 element, set to 1 if what is tested holds inf or NaN.
        tested: Whose inf and NaN count: 0 those of `x`, 1 those of `y`, -1 both [-1].
    """
    torch.ops.apex_mp.axpby_(x, y, out, a, b, found_inf, tested)


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the l2 norm of all tensors as one vector: 0-dim, float64 if one is, else float32."""
    return l2_norms(tensors)[0]


def l2_norms(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the l2 norm of all tensors (0-dim) and the vector of each tensor's own norm."""
    device = tensors[0].device if tensors else torch.device("cpu")
    sum_sq = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    check_(tensors, range(len(tensors)), torch.zeros((), device=device), sum_sq)
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    return sum_sq.sum().sqrt().to(dtype), sum_sq.sqrt().to(dtype)


def exponents_(tensors: Sequence[Tensor], counts: Tensor) -> None:
    """Count the numbers of each tensor by the power of two in which they lie.

    Args:
        tensors: n tensors of any floating dtypes, only read.
        counts: int64, [n, 256]; `counts[i, bin]` grows by how many numbers of `tensors[i]` have
            `2**(bin - 127) <= abs(number) < 2**(bin - 126)`. Zeros are counted in bin 0, inf and
            NaN in bin 255; smaller numbers than 2**-126 in bin 1, float64 numbers of 2**128 and
            more in bin 254.
    """
    torch.ops.apex_mp.exponents_(tensors, counts)


def update_scale_(state: Tensor, rule: Rule, found_inf: Tensor) -> None:
    """Update a dynamic loss scale on its device, after one step.

    The rule is that of `apex_mp.loss_scale.DynamicLossScale`, equal to the bit.

    Args:
        state: float32 vector of three elements: the factor on the loss, and the bits of two int32
            numbers, `good_steps` and `overflows`; written.
        rule: The constants.
        found_inf: One float32 element; not 0: this step's gradients held inf or NaN.
    """
    torch.ops.apex_mp.update_scale_(state, rule, found_inf)
