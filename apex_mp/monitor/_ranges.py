"""The values in tensors: range of magnitudes, inf and NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of the values in a tensor.

    Attributes:
        name: Its place among the arguments or results, for example "[0]['mask']".
        shape: Its shape.
        dtype: Its dtype, for example "float16".
        smallest: The smallest magnitude that is not zero; None if there is none.
        largest: The largest magnitude that is finite; None if there is none.
        inf: How many of its elements are inf or -inf.
        nan: How many are NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    smallest: float | None
    largest: float | None
    inf: int
    nan: int

    def __str__(self) -> str:
        words = [f"{self.dtype} {[*self.shape]}"]
        if self.smallest is not None and self.largest is not None:
            words.append(f"magnitudes {self.smallest:.3g} to {self.largest:.3g}")
        elif self.largest is not None:
            words.append("all zero")
        if self.inf or self.nan:
            words.append(f"{self.inf} inf, {self.nan} NaN")
        return ", ".join(words)


def tensors_in(values: Any) -> list[tuple[str, Tensor]]:
    """Return all floating tensors in tuples, lists and dicts, with their places."""
    if isinstance(values, Tensor):
        values = [values]
    leaves, _ = tree_flatten_with_path(_opened(values))
    return [
        (keystr(path), each)
        for path, each in leaves
        if isinstance(each, Tensor) and each.is_floating_point()
    ]


def _opened(values: Any) -> Any:
    """Return dataclasses, in which models return their results, as dicts."""
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return {each.name: getattr(values, each.name) for each in dataclasses.fields(values)}
    return values


def present_in(values: Any) -> list[Tensor]:
    """Return all floating tensors in tuples, lists and dicts."""
    return [each for _, each in tensors_in(values)]


def ranges_of(values: Any) -> list[Range]:
    """Return the range of each floating tensor in tuples, lists and dicts."""
    return [range_of(path, each) for path, each in tensors_in(values)]


def _numbers_in(values: Tensor) -> Tensor:
    """Return the values of a tensor as a dense one, which torch.isfinite and abs require."""
    numbers = values.detach()
    return numbers.coalesce().values() if numbers.is_sparse else numbers


def holds_nonfinite(values: Tensor) -> bool:
    """Return whether a floating tensor holds inf or NaN."""
    return values.is_floating_point() and not bool(torch.isfinite(_numbers_in(values)).all())


def is_more_than_minus_inf(values: Tensor) -> bool:
    """Return whether a floating tensor holds NaN or +inf."""
    numbers = _numbers_in(values)
    return values.is_floating_point() and bool((numbers.isnan() | numbers.isposinf()).any())


def is_wrong(values: Tensor) -> bool:
    """Return whether a tensor holds inf or NaN and is not a mask: -inf without a gradient graph."""
    return holds_nonfinite(values) and (values.requires_grad or is_more_than_minus_inf(values))


def range_of(name: str, values: Tensor) -> Range:
    """Return the range of a tensor; the host waits."""
    numbers = _numbers_in(values)
    sizes = numbers.abs()[numbers.isfinite()].double()
    present = sizes[sizes > 0]
    return Range(
        name,
        (*values.shape,),
        str(numbers.dtype).removeprefix("torch."),
        present.min().item() if present.numel() else None,
        sizes.max().item() if sizes.numel() else None,
        int(numbers.isinf().sum()),
        int(numbers.isnan().sum()),
    )
