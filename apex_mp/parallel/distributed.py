"""DistributedDataParallel with the arguments of apex, over torch's."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.join import JoinHook

from apex_mp.core.flat_calls import (
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    split_by_type,
    split_half_float_double,
)
from apex_mp.core.log import logger, see
from apex_mp.grads import local_gradients
from apex_mp.masters import parallel_masters
from apex_mp.parallel._reduction import Reduction, reduce_bucket
from apex_mp.parallel.reducer import Reducer
from apex_mp.parallel.sync_batchnorm import SyncBatchNorm

# torch compares the annotations with types, so they cannot be strings.


# Names that apex had in this module, too.
__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "split_by_type",
    "split_half_float_double",
]

_LOG = logger("apex_mp.parallel")
_SHARED = (
    "DistributedDataParallel: shared_param is given; it is no longer supported as an option. Leave "
    "it out, and give delay_allreduce=True for a model whose backward passes use different "
    "parameters"
)
_WITHOUT_EFFECT = {
    "allreduce_trigger_params": "torch begins to send a bucket when it is full",
    "num_allreduce_streams": "torch sends on a stream of its process group",
    "allreduce_communicators": "torch sends on a stream of its process group",
    "prof": "torch.profiler shows what torch does without it",
}


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` with the arguments of apex.

        model = DistributedDataParallel(model)

    The module lies on one device, which the process chose before. Parameters and their masters are
    broadcast from rank 0 by the constructor; gradients are averaged in each backward; buffers are
    not synchronized, as in apex. The first backward shows which parameters get gradients.

    Args:
        module: The model.
        message_size: Elements to gather before they are sent [10,000,000].
        delay_allreduce: Allow backward passes that use different parameters; torch then searches
            the graph in each [False].
        shared_param: No longer supported [None].
        allreduce_trigger_params: No effect: torch orders its buckets itself [None].
        retain_allreduce_buffers: Let gradients be views of the buckets, which are then in
            `allreduce_buffers` until the next forward [False].
        allreduce_always_fp32: Send low-precision gradients as float32 [False].
        num_allreduce_streams: No effect [1].
        allreduce_communicators: No effect [None].
        gradient_average: Divide the sum by the number of processes [True].
        gradient_predivide_factor: Divide by this before the sum, and by the rest after it: float16
            overflows in a sum over many processes, and underflows if divided by their number
            before. With 1, an average divides by their number before, as torch does [1].
        gradient_average_split_factor: The old name of `gradient_predivide_factor` [None].
        prof: No effect [False].

    Raises:
        ValueError: `shared_param` is given, `allreduce_trigger_params` with `delay_allreduce`, a
            factor is not above 0, two different factors are given, or `num_allreduce_streams` is a
            bool.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError(_SHARED)
        if allreduce_trigger_params is not None and delay_allreduce:
            raise ValueError(
                "DistributedDataParallel: allreduce_trigger_params is given with "
                "delay_allreduce=True; it is only valid with False"
            )
        if isinstance(num_allreduce_streams, bool):
            raise ValueError(
                f"DistributedDataParallel: num_allreduce_streams is {num_allreduce_streams}; it "
                "must be a number. In the spring of 2019 gradient_average stood in this place: "
                "give it by name"
            )
        factor = _one_factor(gradient_predivide_factor, gradient_average_split_factor)
        _log_what_has_no_effect(
            allreduce_trigger_params=allreduce_trigger_params is not None,
            num_allreduce_streams=num_allreduce_streams != 1,
            allreduce_communicators=bool(allreduce_communicators),
            prof=bool(prof),
        )
        with warnings.catch_warnings():
            # Its successor, forward_sync_buffers, is not the same, and older torch lacks it.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                broadcast_buffers=False,
                bucket_cap_mb=max(1, message_size * 4 // 2**20),
                find_unused_parameters=delay_allreduce,
                gradient_as_bucket_view=retain_allreduce_buffers,
                # In apex, too, the first backward shows which parameters get gradients.
                static_graph=not delay_allreduce,
            )
        self._has_others = dist.get_world_size() > 1
        self._reduction = Reduction(
            gradient_average,
            factor,
            allreduce_always_fp32,
            buffers={} if retain_allreduce_buffers else None,
        )
        self._reduces_itself = False
        if not self._reduction.is_torchs:
            self._reduce_here()
        self._begin()
        parallel_masters.broadcast(module)
        parallel_masters.follow_join()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._reduces_itself:  # torch has made a new reducer, which has no hook yet.
            self._reduce_here()
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: it for name, it in state.items() if name not in ("_nodes", "_learning")}

    def _begin(self) -> None:
        """Make a new reducer of torch's, which does not know the graph yet."""
        self._all_params = [*self.module.parameters()]
        self._trained = [param.requires_grad for param in self._all_params]
        # Kept here: torch's reducer needs these nodes to stay the same.
        reduced = [param for param in self._all_params if param.requires_grad]
        self._nodes = [get_gradient_edge(param).node for param in reduced]
        self._has_run_backward = self._runs_backward = False
        self._is_prepared = self._has_accumulated = False
        self._learning: list[Any] = []
        if self.static_graph:
            # Keeps torch from recording the graph at tensors that it finds in the output. It finds
            # none in a dataclass; and after a backward that is not for this model, or
            # torch.autograd.grad, it would count all parameters as unused.
            self._static_graph_delay_allreduce_enqueued = True
            note = functools.partial(_note_gradient, weakref.ref(self))
            self._learning = [param.register_post_accumulate_grad_hook(note) for param in reduced]

    def _reduce_here(self) -> None:
        self._check_divisor()
        super().register_comm_hook(self._reduction, reduce_bucket)
        self._reduces_itself = True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Set a communication hook, unless an argument of the constructor needs its own hook."""
        if not self._reduces_itself:
            self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
            self._reduction.others = (state, hook)  # Ours still leaves gradients where they are.
            self._reduce_here()
        else:
            super().register_comm_hook(state, hook)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that `join()` calls.

        Raises:
            ValueError: `divide_by_initial_world_size` is False, and an argument of the constructor
                needs a hook, which divides by the number of all processes.
        """
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        if self._reduces_itself:
            self._check_divisor()
        return hook

    def _check_divisor(self) -> None:
        if getattr(self, "_divide_by_initial_world_size", True):
            return
        raise ValueError(
            "DistributedDataParallel: join has divide_by_initial_world_size=False, which torch "
            "can do only where no hook reduces gradients; here one does, for an argument of this "
            "class, no_sync or disable_allreduce. Leave it True"
        )

    # Accumulation.

    def disable_allreduce(self) -> None:
        """Stop averaging gradients in the backward passes that follow.

        They add up, and the first backward after `enable_allreduce` averages their sum. The state
        at the time of backward counts; with torch's `no_sync` it is that at the time of forward.
        """
        if not self._reduces_itself:
            self._reduce_here()
        self._reduction.is_on = False

    def enable_allreduce(self) -> None:
        """Average gradients again, from the next backward on."""
        self._reduction.is_on = True

    @property
    def allreduce_is_enabled(self) -> bool:
        """Whether the next backward averages gradients; `no_sync` does not count."""
        return self._reduction.is_on

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The vectors that the last backward reduced, with `retain_allreduce_buffers`; else []."""
        buffers = self._reduction.buffers or {}
        return [buffers[index] for index in sorted(buffers)]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module.

        With several processes a second backward through one forward raises a RuntimeError, because
        torch does not average its gradients.
        """
        if self._reduction.buffers and torch.is_grad_enabled():
            self._reduction.buffers.clear()  # torch may cut others after the first backward.
        if torch.is_grad_enabled():
            self._follow_requires_grad()
            local_gradients.note_forward(self, is_local=not self.require_backward_grad_sync)
        with self._teaching_the_graph():
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._has_run_backward = self._runs_backward = False
        self._is_prepared |= torch.is_grad_enabled()
        is_parallel = self.require_backward_grad_sync and self._has_others
        # Not a generator: reading the tensors that it yields would use it up.
        if torch.is_grad_enabled() and is_parallel and not isinstance(output, Iterator):
            found: list[Tensor] = []
            extract_tensors(output, found)
            for tensor in found:
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return output

    @contextlib.contextmanager
    def _teaching_the_graph(self) -> Iterator[None]:
        """Make torch record the graph in the first backward, even in `no_sync`.

        torch expects the first backward to show which parameters get gradients, but records nothing
        in `no_sync`; then it would never average gradients.
        """
        self._reduction.is_held = bool(self._learning) and not self.require_backward_grad_sync
        if not self._reduction.is_held:
            yield
            return
        if not self._reduces_itself:
            self._reduce_here()
        self.require_backward_grad_sync = True
        try:
            yield
        finally:
            self.require_backward_grad_sync = False

    def _begin_backward(self, grad: Tensor) -> None:
        if self._runs_backward:
            return  # Another of several outputs.
        leaves_gradients = self._leaves_gradients()
        if leaves_gradients and self._has_run_backward and self._reduction.is_on:
            raise RuntimeError(
                "DistributedDataParallel: this is a second backward through one forward, whose "
                "gradients would not be averaged; add the losses and run one, or call the model "
                "again"
            )
        self._has_run_backward |= leaves_gradients  # Not by torch.autograd.grad of the input.
        self._await_end()

    def _await_end(self) -> None:
        self._runs_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._runs_backward = False
        if self._has_accumulated and self._learning:
            self._stop_learning()
            self.reducer._delay_all_reduce()  # type: ignore[attr-defined]

    def _leaves_gradients(self) -> bool:
        """Return whether the current backward adds to gradients of parameters."""
        try:
            return any(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # torch.autograd.grad of parameters.
            return False

    def _stop_learning(self) -> None:
        for handle in self._learning:
            handle.remove()
        self._learning = []

    def _follow_requires_grad(self) -> None:
        """Make a new reducer, which has a fixed list, if other parameters require grad than before.

        Nothing changes while none requires grad, as in the half of a GAN that is not trained now.
        """
        trained = [param.requires_grad for param in self._all_params]
        if trained == self._trained or not any(trained):
            return
        if self.find_unused_parameters and all(map(operator.le, trained, self._trained)):
            return  # It finds those that are frozen now.
        self._stop_learning()
        self.__setstate__({})

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """Keep torch from refusing SyncBatchNorm on the CPU, where ours runs."""
        kinds = {type(each) for each in module.modules() if not isinstance(each, SyncBatchNorm)}
        if any(issubclass(kind, torch.nn.SyncBatchNorm) for kind in kinds):
            super()._passing_sync_batchnorm_handle(module)  # type: ignore[no-untyped-call]


def _note_gradient(model: weakref.ref[DistributedDataParallel], _: Tensor) -> None:
    """Note that a parameter got a gradient before the graph is known.

    The graph is complete at the end of the outermost backward, which a tensor in the output shows.
    If the output has no tensor, the current backward counts as the outermost.
    """
    self = model()
    if self is None or not self._is_prepared:
        return
    self._has_accumulated = True
    if not self._runs_backward:
        self._await_end()


def _one_factor(factor: float, old_name: float | None) -> float:
    if old_name is not None:
        if factor not in (1.0, old_name):
            raise ValueError(
                f"DistributedDataParallel: gradient_average_split_factor is {old_name} and "
                f"gradient_predivide_factor {factor}; they are one thing, so give the second alone"
            )
        factor = old_name
    if not factor > 0:
        raise ValueError(
            f"DistributedDataParallel: gradient_predivide_factor is {factor}; it must be above 0"
        )
    return factor


def _log_what_has_no_effect(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            why = _WITHOUT_EFFECT[name] + see("arguments-without-effect")
            _LOG.warning("DistributedDataParallel: %s has no effect: %s", name, why)
