"""What training costs: time, bytes held for backward, bytes of state; and the record of a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from apex_mp.grads.nonfinite import NonFinite
from apex_mp.masters.masters import stored_grad


@dataclasses.dataclass
class Run:
    """One training run: a value for each step, then what was measured once."""

    name: str
    seed: int
    scaled: bool  # whether a loss scale belongs to it
    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    forward_backward_ms: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    first_overflow: str = ""
    final_scale: float = 1.0
    accuracy: float = 0.0
    state_bytes_per_param: float = 0.0
    activation_bytes_per_image: float = 0.0

    def note_skip(self, step: int, overflows: Sequence[NonFinite]) -> None:
        if not self.skipped and overflows:
            where = f"seed {self.seed}, step {step}, loss scale {self.scales[-1]:g}"
            self.first_overflow = f"{where}: {overflows[0]}"
        self.skipped.append(step)


class Stopwatch:
    """Wall-clock milliseconds; on a GPU after what was asked of it is done."""

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._begin = 0.0

    def start(self) -> None:
        self._begin = self._now()

    def lap(self) -> float:
        return (self._now() - self._begin) * 1e3

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def bytes_held_for_backward(model: nn.Module, images: Tensor) -> int:
    """Bytes that autograd keeps from forward to backward, the parameters themselves not counted."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    # A slice would count as all of the data set.
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(images.clone()).float(), labels)
    return _storage_bytes(held.values())


def bytes_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients, masters and optimizer state for each parameter, after a step."""
    params = list(model.parameters())
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = params + masters
    # To look at a master's .grad would make it; this counts one only if it exists.
    tensors += [grad for grad in map(stored_grad, tensors) if grad is not None]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    return _storage_bytes(tensors) / sum(param.numel() for param in params)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
