"""How benchmarks see memory: what work allocates, what is held between steps and for backward.

torch's allocator knows every byte of every tensor that the calling thread makes, and nothing else.
The resident set of the process has everything else too, C++ vectors and other threads, but in
pages, and only what was written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.nn.modules import module as modules
from torch.profiler import ProfilerActivity, profile

from apex_mp.masters.masters import stored_grad
from apex_mp.optimizers import MasterWeights

HELD = ("weights", "gradients", "masters", "moments")
PROC = Path("/proc/self")
# For a process that calls `resident`: else glibc keeps what was freed, up to 32 MiB a block, and
# the next temporary goes there unseen.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0"}


class Extra(NamedTuple):
    """Bytes beyond those that were there before."""

    peak: int
    after: int


def allocated(work: Callable[[], object], device: str) -> Extra:
    """Run something, and return what torch's allocator gave out meanwhile.

    On a CPU, memory from before that is freed meanwhile does not count; on a GPU it does.
    """
    return _allocated_on_gpu(work) if device == "cuda" else _allocated_on_cpu(work)


def _allocated_on_cpu(work: Callable[[], object]) -> Extra:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # It says on stderr when it starts and stops.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    given: dict[int, int] = {}
    total = peak = 0
    for place, size in _events(profiler):
        if size > 0:
            given[place] = size
            total += size
            peak = max(peak, total)
        else:  # The profiler has sizes of earlier profiles for what was there before.
            total -= given.pop(place, 0)
    return Extra(peak, total)


def _events(profiler: profile) -> list[tuple[int, int]]:
    """Return the address and the size of each allocation in turn; sizes of freed ones are < 0."""
    found = []
    waiting = profiler.profiler.kineto_results.experimental_event_tree()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(place, size) for _, place, size in sorted(found, key=lambda one: one[0])]


def _allocated_on_gpu(work: Callable[[], object]) -> Extra:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = _requested_on_gpu("current")
    work()
    torch.cuda.synchronize()
    return Extra(_requested_on_gpu("peak") - before, _requested_on_gpu("current") - before)


def _requested_on_gpu(which: str) -> int:
    """Return the bytes of all tensors; their blocks are up to a MiB larger."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def can_see_resident() -> bool:
    """Return whether the peak of the resident set can be set back here: Linux."""
    return (PROC / "clear_refs").exists()


def resident(work: Callable[[], object]) -> Extra:
    """Run something, and return by how much the resident set of this process grew meanwhile."""
    (PROC / "clear_refs").write_text("5")  # the peak is now what there is
    before = _status("VmHWM")
    work()
    return Extra(_status("VmHWM") - before, _status("VmRSS") - before)


def _status(name: str) -> int:
    (found,) = re.findall(rf"{name}:\s*(\d+) kB", (PROC / "status").read_text())
    return int(found) * 1024


def by_storage(named: dict[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the bytes of the memory behind each list, counted where it is met first."""
    seen: set[int] = set()
    sizes = {}
    for name, tensors in named.items():
        new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        sizes[name] = sum(size for place, size in new.items() if place not in seen)
        seen.update(new)
    return sizes


def held(
    weights: Sequence[Tensor], grads: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Return the bytes held between backward and step, by what holds them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [state.items() for state in optimizer.state.values()]
    state = [(key, value) for one in states for key, value in one if torch.is_tensor(value)]
    store = getattr(optimizer, "_own_masters", None)
    masters = [] if store is None else [*store.kept.values()]
    kept = dict[Tensor, Tensor]()
    if isinstance(optimizer, MasterWeights):
        kept = optimizer._float32_grads.kept or {}
    # To look at a master's .grad would make it; this counts one only if it exists.
    unscaled = [grad for grad in map(stored_grad, params) if grad is not None]
    lists = (
        weights,
        [*grads, *unscaled, *kept.values()],
        params + masters,
        [value for _, value in state],
    )
    return by_storage(dict(zip(HELD, lists, strict=True)))


def held_for_backward(
    forward: Callable[[], Tensor], known: Iterable[Tensor]
) -> Counter[tuple[str, str]]:
    """Return the bytes that autograd keeps from forward for backward, each storage once.

    Args:
        forward: Returns the loss.
        known: Tensors that are there anyway and are not counted: parameters, buffers, inputs.

    Returns:
        Bytes, by the class of the module that runs when a tensor is saved first ("loss" outside
        of all), and by the tensor's dtype.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}
    found: Counter[tuple[str, str]] = Counter()
    running = ["loss"]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[running[-1], dtype] += storage.nbytes()
        return tensor

    # The loss holds the graph, and with it all that was saved: no address is used twice.
    with (
        _named_modules(running),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        loss = forward()
    del loss
    return found


@contextlib.contextmanager
def _named_modules(running: list[str]) -> Iterator[None]:
    """Within it, the classes of the modules in forward are appended to `running`."""

    def enter(module: nn.Module, _: object) -> None:
        running.append(type(module).__name__)

    def leave(_module: nn.Module, _inputs: object, _outputs: object) -> None:
        running.pop()

    hooks = (
        modules.register_module_forward_pre_hook(enter),
        modules.register_module_forward_hook(leave),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
