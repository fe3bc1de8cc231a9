"""One step over plain lists of tensors, for functions of apex that take such lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import extension


# As for FusedOptimizer.step: a traced step would break the graph anyway.
@torch._disable_dynamo  # type: ignore[attr-defined]
def step_lists(
    rule: str,
    caller: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    tensors: Mapping[str, Sequence[Tensor]],
    numbers: Mapping[str, Sequence[Tensor]],
    options: Mapping[str, Any],
    copies: Sequence[Tensor] | None = None,
    scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
    norm: float | Tensor | None = None,
) -> None:
    """Take one step with every parameter; the host waits for nothing.

    Lists hold one tensor for each parameter, on the same device and with the same layout. A CUDA
    graph may capture the step; numbers that are not tensors are then the same at each replay.

    Args:
        rule: `kName` of one of csrc/math/rules.h.
        caller: The function's name, for messages.
        params: Parameters of any floating dtypes; written.
        grads: Gradients of any floating dtypes; only read.
        tensors: The tensors of the rule's state, a list for each name, in the rule's order;
            written. Math is in float64 for float64 parameters, else in float32; state of another
            dtype is rounded to it.
        numbers: The numbers of the rule's state, likewise, each of one float32 element; written.
        options: The rule's options and `lr`; `max_grad_norm` may be left out.
        copies: Where each new parameter is also written, rounded to the copy's dtype [None].
        scale: Gradients are divided by it [1].
        found_inf: One element; if it is not 0 nothing changes [None].
        norm: The l2 norm, before unscaling, by which `max_grad_norm` clips [None: it is measured].

    Raises:
        RuntimeError: Tensors do not fit each other, or are on a device without kernels.
        TypeError: An option is no number, or a tensor is a wrapper without memory of its own.
        ValueError: An option is out of range, or a parameter stands twice.
    """

    def refuse(group: int, index: int) -> dict[str, Any]:
        raise RuntimeError(
            f"{caller}: the state of params[{index}] lies in memory in another order than it; make "
            "all of them contiguous()"
        )

    plan = _C.StepPlan(rule, caller, tensors=[*tensors], numbers=[*numbers], once=True)
    group = {"max_grad_norm": 0.0, **options, "params": [*params]}
    with torch.no_grad(), _as_wide_as_the_math(params, tensors) as wide:
        state: dict[Tensor, dict[str, Tensor]] = {param: {} for param in params}
        for name, listed in {**wide, **numbers}.items():
            for param, tensor in zip(params, listed, strict=True):
                state[param][name] = tensor
        plan.read(
            [group],
            state,
            {},
            refuse,
            grads=[[*grads]],
            grads_of=None,
            copies=None if copies is None else [[*copies]],
            scale=scale,
            origins=[(-1, index, index) for index in range(len(params))],  # of no group
        )
        if not plan.can_run:
            raise RuntimeError(_cannot_run(caller, params))
        plan.run(
            norms=None if norm is None else [norm],
            found_inf=found_inf,
            check=False,
            clip_to=None,
            clip_norm=None,
            clip_by_global_norm=False,
            loss_scale=None,
            wait=False,
        )


@contextlib.contextmanager
def _as_wide_as_the_math(
    params: Sequence[Tensor], tensors: Mapping[str, Sequence[Tensor]]
) -> Iterator[dict[str, list[Tensor]]]:
    """Yield the state in the dtype of the math, and round it back afterwards."""
    dtypes = [torch.float64 if p.dtype == torch.float64 else torch.float32 for p in params]
    wide = {
        name: [
            tensor if tensor.dtype is dtype else tensor.to(dtype)
            for tensor, dtype in zip(listed, dtypes, strict=True)
        ]
        for name, listed in tensors.items()
    }
    yield wide
    for name, listed in tensors.items():
        for tensor, stepped in zip(listed, wide[name], strict=True):
            if stepped is not tensor:
                tensor.copy_(stepped)


def _cannot_run(caller: str, params: Sequence[Tensor]) -> str:
    device = params[0].device
    for index, param in enumerate(params):
        if param.device != device:
            return (
                f"{caller}: params[{index}] is on {param.device}, params[0] on {device}; they must "
                "be on one device"
            )
    return f"{caller}: params[0] {extension.no_kernels(device)}"
