"""`python -m apex_mp estimate train.py:build`: bytes and times of a model's training, by each way.

Without a GPU nothing of the model is computed: torch's FakeTensorMode runs its code on shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import runpy
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_map_only

from apex_mp.amp.grad_scaler import GradScaler
from apex_mp.masters.cast_parameters import cast_parameters
from apex_mp.optimizers import FusedAdamW

# Elements of a sample of a state, at most, and those for which an optimizer's step is timed.
_SAMPLE, _TIMED = 2**12, 2**25
_SPLIT: dict[str, Any] = {"master_weights": True}
_ROUNDED = {"moment_dtype": torch.bfloat16, "stochastic_rounding": True}


class Way(NamedTuple):
    """A way to train; `options` are FusedAdamW's, None for torch's AdamW."""

    name: str
    casts: bool
    options: Mapping[str, Any] | None
    autocast: bool = False

    def optimizer(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer over parameters."""
        if self.options is None:
            return torch.optim.AdamW(params, fused=True)
        return FusedAdamW(params, **self.options)


WAYS = (
    Way("float32 weights", False, {}),
    Way("float32 weights under torch.autocast", False, {}, autocast=True),
    Way("16-bit weights, float32 masters", True, {"master_weights": "float32"}),
    Way("16-bit weights, split masters", True, _SPLIT),
    Way("the same, moments in bfloat16", True, {**_SPLIT, **_ROUNDED}),
    Way("the same, moments in one byte", True, {**_SPLIT, "moment_dtype": torch.int8}),
    Way("16-bit weights, torch's AdamW: loses small updates", True, None),
)


class Row(NamedTuple):
    """Bytes of one way, and milliseconds."""

    name: str
    weights: int
    gradients: int
    masters: int
    moments: int
    backward: int | None
    peak: int | None
    milliseconds: float

    @property
    def total(self) -> int:
        """What is held at the end of forward, gradients included."""
        return sum((*self[1:5], self.backward or 0))


Loss = Callable[[nn.Module], Tensor]


@contextlib.contextmanager
def _only_shapes() -> Iterator[None]:
    """Within it, code runs on shapes."""
    # Module.to and half swap parameters, which torch refuses to do to tensors with weak references.
    # The mode has some to all, and they do no harm.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(weakref, "getweakrefs", return_value=()),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by deepcopy
        yield


def main(arguments: Sequence[str]) -> int:
    """Print the table of a model; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp estimate",
        allow_abbrev=False,
        description="Print how many bytes the training of a model holds and how long a step takes, "
        "by each way to keep weights, masters and moments. Without a GPU, or with --count, "
        "activations are counted from shapes, and the time is that of the optimizer's step; "
        "else whole steps are run and timed.",
    )
    parser.add_argument(
        "target",
        help="module:callable or file.py:callable; it is called without arguments, and returns a "
        "model, or a model and a function that takes the model and returns the loss of one batch",
    )
    parser.add_argument("--device", default=None, help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--count", dest="run", action="store_false", help="run no step of the model")
    how.add_argument("--run", action="store_true", help="run and time whole steps; slow on a CPU")
    parser.set_defaults(run=torch.cuda.is_available())
    given = parser.parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no such device here")
    try:
        build = _callable(given.target)
        rows = estimate(build, device, getattr(torch, given.dtype), run=given.run)
    except DataDependentOutputException as error:
        raise SystemExit(
            f"python -m apex_mp estimate: the code reads numbers of a tensor ({error}), and only "
            "shapes are counted; --run runs it"
        ) from None
    except (ImportError, AttributeError, OSError, TypeError, ValueError) as error:
        print(f"python -m apex_mp estimate: {error}", file=sys.stderr)
        return 1
    print(text(rows, device, run=given.run))
    return 0


def _callable(target: str) -> Callable[[], Any]:
    """Return what `module:callable` or `file.py:callable` names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ValueError(f"{target!r} must be module:callable or file.py:callable")
    if where.endswith(".py"):
        names = runpy.run_path(where)
    else:
        sys.path.insert(0, "")
        names = vars(importlib.import_module(where))
    found = names.get(name)
    if not callable(found):
        raise ValueError(f"{where} has no function {name!r}")
    build: Callable[[], Any] = found
    return build


def estimate(build: Callable[[], Any], device: str, dtype: torch.dtype, *, run: bool) -> list[Row]:
    """Return a row for each way.

    Args:
        build: Returns a model, or a model and a function from it to the loss of a batch.
        device: Where states are made and timed.
        dtype: torch.float16 or torch.bfloat16.
        run: Whether whole steps are run, instead of activations counted from shapes.
    """
    return [_row(way, build, device, dtype, run=run) for way in WAYS]


def _row(way: Way, build: Callable[[], Any], device: str, dtype: torch.dtype, *, run: bool) -> Row:
    gc.collect()  # The model of the last way is part of no peak.
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=way.autocast)
    with contextlib.nullcontext() if run else _only_shapes():
        model, loss_of = _built(build, device)
        if way.casts:
            cast_parameters(model, dtype)
            _cast_at_the_ends(model, dtype)
        known = [*model.parameters(), *model.buffers()]
        backward = None if loss_of is None else _for_backward(model, loss_of, autocast, known)
    params = [param for param in model.parameters() if param.requires_grad]
    sample = functools.cache(functools.partial(_state_of, way, device=device))
    states = [
        (param.numel(), sample(param.dtype, min(param.numel() or 1, _SAMPLE))) for param in params
    ]
    masters, moments = (round(sum(size * of[kind] for size, of in states)) for kind in (0, 1))
    peak = None
    if run and loss_of is not None:
        milliseconds, peak = _of_whole_steps(way, model, loss_of, autocast, device)
    else:
        milliseconds = _of_the_optimizer(way, params, device)
    weights, gradients = (sum(each.nbytes for each in some) for some in (known, params))
    return Row(way.name, weights, gradients, masters, moments, backward, peak, milliseconds)


def _built(build: Callable[[], Any], device: str) -> tuple[nn.Module, Loss | None]:
    torch.manual_seed(0)
    with torch.device(device):
        made = build()
    model, loss_of = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (loss_of is None or callable(loss_of)):
        raise TypeError(
            f"the callable returned {type(made).__name__}; it must return a Module, or a Module "
            "and a function of it that returns the loss"
        )
    return model.to(device).train(), loss_of


def _cast_at_the_ends(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating point inputs of forward to 16 bits, and its outputs to float32."""

    def to(dtype: torch.dtype, values: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)

    model.register_forward_pre_hook(
        lambda _, args, kwargs: to(dtype, (args, kwargs)), with_kwargs=True
    )
    model.register_forward_hook(lambda _model, _inputs, output: to(torch.float32, output))


def _for_backward(
    model: nn.Module, loss_of: Loss, autocast: torch.autocast, known: Sequence[Tensor]
) -> int:
    """Return the bytes that autograd keeps from forward for backward, each storage once."""
    storages = {each.untyped_storage()._cdata: 0 for each in known}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage.nbytes())
        return tensor

    # The loss holds what was saved, so that no storage comes in the place of another.
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise TypeError("the function of the model must return a loss that needs a gradient")
    return sum(storages.values())


def _state_of(way: Way, dtype: torch.dtype, size: int, device: str) -> tuple[float, float]:
    """Return the bytes of masters and of moments for each element, by a step of a sample."""
    param = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
    param.grad = torch.zeros_like(param)
    optimizer = way.optimizer([param])
    optimizer.step()
    state = [each for each in optimizer.state[param].values() if torch.is_tensor(each)]
    store = getattr(optimizer, "_own_masters", None)
    masters = [] if store is None else [*store.kept.values()]
    known = {each.data_ptr() for each in masters}
    moments = [each for each in state if each.dim() and each.data_ptr() not in known]
    held = [sum(each.nbytes for each in some) / size for some in (masters, moments)]
    return held[0], held[1]


def _of_the_optimizer(way: Way, shapes: Sequence[Tensor], device: str) -> float:
    """Return the milliseconds of an optimizer's step; of a large model by a part of it."""
    params: list[Tensor] = []
    elements = 0
    for each in shapes:
        if elements < _TIMED:
            taken = min(each.numel(), _TIMED - elements)
            shape = each.shape if taken == each.numel() else (taken,)
            param = nn.Parameter(torch.ones(shape, dtype=each.dtype, device=device))
            param.grad = torch.full_like(param, 1e-3)
            params.append(param)
            elements += taken
    optimizer = way.optimizer(params)
    return _median_of(optimizer.step, device) * sum(each.numel() for each in shapes) / elements


def _of_whole_steps(
    way: Way, model: nn.Module, loss_of: Loss, autocast: torch.autocast, device: str
) -> tuple[float, int | None]:
    """Return the milliseconds of a training step, and on a GPU its largest memory in bytes."""
    optimizer = way.optimizer([param for param in model.parameters() if param.requires_grad])
    is_float16 = torch.float16 in (next(model.parameters()).dtype, autocast.fast_dtype)
    scaler = GradScaler(torch.device(device).type, enabled=is_float16, init_scale=2.0**10)

    def step() -> None:
        with autocast:
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*updates-are-lost")  # The row's name says so.
        step()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    milliseconds = _median_of(step, device)
    return milliseconds, None if device == "cpu" else torch.cuda.max_memory_allocated()


def _median_of(work: Callable[[], object], device: str) -> float:
    """Return the median of seven calls in milliseconds, after two."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def text(rows: Sequence[Row], device: str, *, run: bool) -> str:
    """Return rows as a table."""
    heads = ["way", "weights", "gradients", "masters", "moments", "activations", "sum", "peak"]
    has_loss = rows[0].backward is not None
    heads.append("ms a step" if run and has_loss else "ms of the optimizer")
    lines = [[row.name, *map(_size, row[1:6]), _size(row.total), _size(row.peak)] for row in rows]
    table = [heads, *([*line, f"{row[-1]:.3g}"] for line, row in zip(lines, rows, strict=True))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if rows[0].peak is None:
        widths[heads.index("peak")] = 0
    printed = [
        "  ".join(
            f"{cell:<{width}}" if not place else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        )
        for row in table
    ]
    how = "run" if run else "counted from shapes"
    printed.append(f"activations: what autograd keeps for backward, {how}; times on {device}")
    return "\n".join(printed)


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    unit = next(each for each in ("GiB", "MiB", "KiB", "B") if count >= _UNITS[each] or each == "B")
    return f"{count / _UNITS[unit]:.4g} {unit}"


_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
