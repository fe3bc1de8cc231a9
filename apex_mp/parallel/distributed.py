"""DistributedDataParallel and Reducer with the arguments of apex, over torch.distributed."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from apex_mp.parallel.flat_calls import extract_tensors
from apex_mp.parallel.sync_batchnorm import needs_torchs_check

_SHARED = (
    "DistributedDataParallel: shared_param is given; it is no longer supported as an option. Leave "
    "it out, and give delay_allreduce=True for a model whose backward passes use different "
    "parameters"
)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` with the arguments of apex.

    The module lies on one device, which the process chose before. Parameters are broadcast from
    rank 0 now, gradients averaged in each backward; buffers are left alone, as in apex. The first
    backward shows which parameters get gradients.

    Args:
        module: The model.
        message_size: Elements to gather before they are sent [10,000,000].
        delay_allreduce: Allow backward passes that use different parameters; torch then searches
            the graph in each [False].
        shared_param: No longer supported [None].
        allreduce_trigger_params: No effect: torch orders its buckets itself [None].
        retain_allreduce_buffers: No effect [False].
        allreduce_always_fp32: Send low-precision gradients as float32 [False].
        num_allreduce_streams: No effect [1].
        allreduce_communicators: No effect [None].
        gradient_average: Divide the sum by the number of processes [True].
        gradient_predivide_factor: Divide by this before the sum and by the rest after it [1].
        gradient_average_split_factor: No effect; the old name of the one before [None].
        prof: No effect [False].

    Raises:
        ValueError: `shared_param` is given, or `allreduce_trigger_params` with `delay_allreduce`.
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
        with warnings.catch_warnings():
            # Its successor, forward_sync_buffers, is not the same, nor in every torch we run on.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                broadcast_buffers=False,
                bucket_cap_mb=max(1, message_size * 4 // 2**20),
                find_unused_parameters=delay_allreduce,
                # apex learnt from the first backward which parameters get gradients, too.
                static_graph=not delay_allreduce,
            )
        self._has_others = dist.get_world_size() > 1
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            after = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            reduction = _reduction(1.0 / gradient_predivide_factor, after, allreduce_always_fp32)
            self.register_comm_hook(None, reduction)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module.

        A second backward through one forward, of which torch averages no gradients, is refused
        with a RuntimeError where there are several processes.
        """
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._has_run_backward = self._runs_backward = False
        if torch.is_grad_enabled() and self.require_backward_grad_sync and self._has_others:
            found: list[Tensor] = []
            extract_tensors(output, found)
            for tensor in found:
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return output

    def _begin_backward(self, grad: Tensor) -> None:
        if self._runs_backward:
            return  # Another of several outputs.
        if self._has_run_backward:
            raise RuntimeError(
                "DistributedDataParallel: this is a second backward through one forward, whose "
                "gradients would not be averaged; add the losses and run one, or call the model "
                "again"
            )
        self._has_run_backward = self._runs_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._runs_backward = False

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """Keep torch from refusing every SyncBatchNorm on the CPU, where ours runs."""
        if needs_torchs_check(module):
            super()._passing_sync_batchnorm_handle(module)  # type: ignore[no-untyped-call]


def _reduction(
    before: float, after: float, in_fp32: bool
) -> Callable[[object, Any], torch.futures.Future[Tensor]]:
    """Return how a bucket of gradients becomes their sum or average: torch calls it for each."""

    # torch compares the annotations with types: they may not be strings.
    def reduce(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        sent = (buffer.float() if in_fp32 else buffer).mul_(before)
        future = dist.all_reduce(sent, async_op=True).get_future()
        reduced: torch.futures.Future[Tensor] = future.then(
            lambda done: buffer.copy_(done.value()[0].mul_(after))
        )
        return reduced

    return reduce


class Reducer:
    """Average gradients over all processes when `reduce()` is called.

    Args:
        module_or_grads_list: A model, whose parameters are broadcast from rank 0 now, or a list of
            gradients.
    """

    def __init__(self, module_or_grads_list: torch.nn.Module | Iterable[Tensor]) -> None:
        self.module: torch.nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            for param in self.module.parameters():
                dist.broadcast(param.detach(), 0)
        else:
            self.grads = [*module_or_grads_list]

    def reduce(self) -> None:
        """Replace each gradient by the average over all processes."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
