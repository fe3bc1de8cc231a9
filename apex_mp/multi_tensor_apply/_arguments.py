"""What the functions of amp_C are given: lists to check, and an overflow flag to translate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def check_lists(function: str, tensor_lists: Lists, names: Sequence[str]) -> None:
    """Refuse lists that do not belong together.

    Raises:
        RuntimeError: There is another number of lists, they are empty, or their lengths or the
            sizes of tensors at one index differ.
    """
    if len(tensor_lists) != len(names):
        raise RuntimeError(
            f"{function}: tensor_lists holds {len(tensor_lists)} lists; "
            f"it must hold {len(names)}: {', '.join(names)}"
        )
    first, *others = tensor_lists
    if not first:
        raise RuntimeError(f"{function}: {names[0]} is empty; it must hold a tensor at least")
    for name, tensors in zip(names[1:], others, strict=True):
        if len(tensors) != len(first):
            raise RuntimeError(
                f"{function}: {name} holds {len(tensors)} tensors, {names[0]} holds {len(first)}; "
                "they must be as many"
            )
        for index, (tensor, reference) in enumerate(zip(tensors, first, strict=True)):
            if tensor.numel() != reference.numel():
                raise RuntimeError(
                    f"{function}: {name}[{index}] has {tensor.numel()} elements, "
                    f"{names[0]}[{index}] has {reference.numel()}; they must be as many"
                )


@contextlib.contextmanager
def raising(flag: Tensor) -> Iterator[Tensor]:
    """Yield the operators' `found_inf` for an old overflow flag, and write it back afterwards.

    The flag, of any dtype with one element, is read and written where it lies: the host never
    waits. It is raised to 1 and never cleared. Old callers hand over parameters as they are, so
    autograd is off meanwhile.

    Raises:
        RuntimeError: The flag has not one element.
    """
    if flag.numel() != 1:
        raise RuntimeError(
            f"the overflow flag has {flag.numel()} elements; it must be a tensor of one, "
            "such as torch.IntTensor([0])"
        )
    found_inf = (flag.detach().reshape(()) != 0).float()
    with torch.no_grad():
        yield found_inf
        flag.detach().logical_or_(found_inf)


def number(value: float | Tensor) -> Tensor:
    """Return a factor as the operators take it."""
    if isinstance(value, Tensor):
        return value if value.dtype in (torch.float32, torch.float64) else value.double()
    return torch.tensor(value, dtype=torch.float64, device="cpu")
