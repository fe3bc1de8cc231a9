"""Small programs that run every kernel of csrc/cuda/, for compute-sanitizer.

python -m benchmarks.gpu_programs                       all of them on the GPU
python -m benchmarks.gpu_programs --device cpu          their code, without kernels
python -m benchmarks.gpu_programs --profile             did each run the kernels it is for?
python -m benchmarks.gpu_programs beyond                reads beyond a tensor: memcheck must see it
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

from apex_mp.core import ops, readback
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.multi_tensor_apply import amp_C
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from benchmarks.gpu_build import ROOT

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (F16, BF16, F32, F64)
CHUNK = 16384
SIZES = (1, 0, 9, 257, CHUNK - 1, 2 * CHUNK + 5)


def filled(size: int, dtype: torch.dtype, device: str, offset: int = 0) -> torch.Tensor:
    """Return numbers made on the host, `offset` numbers after the start of their memory."""
    return torch.linspace(-1.0, 1.0, size + offset).to(dtype).to(device)[offset:]


def params_of(device: str, dtypes: Iterable[torch.dtype], sizes: Iterable[int]) -> list[Any]:
    """Return parameters of each dtype and size, aligned and not, with gradients."""
    params = []
    for dtype in dtypes:
        for i, size in enumerate(sizes):
            params.append(Parameter(filled(size, dtype, device, i % 2)))
            params[-1].grad = filled(size, dtype, device, i % 3)
    return params


def call_each_operator(device: str) -> None:
    """Every operator on lists of the tests' table: of many sizes, offsets, dtypes and launches."""
    sys.path.append(str(ROOT / "tests"))
    table: Any = importlib.import_module("op_cases")
    wanted = ("chunks of many tensors", "empty in the middle", "each list off by another")
    cases = [case for case in table.LISTS if case.name in wanted]
    for operator in table.OPERATORS:
        for dtypes in (operator.dtypes[0], operator.dtypes[-1]):
            for case in cases:
                operator(operator.sample(case, dtypes, torch.device(device)))
        operator(operator.sample(table.MANY_LISTS[0], operator.dtypes[0], torch.device(device)))


FUSED: dict[str, Callable[..., Any]] = {
    "Adam": FusedAdam,
    "Sgd": functools.partial(FusedSGD, lr=1e-3, momentum=0.9, dampening=0.1),
    "Adagrad": FusedAdagrad,
    "Novograd": FusedNovoGrad,
    "Lamb": FusedLAMB,
}
EACH_STEP = (*(f"step<{rule}>" for rule in FUSED), "measure<Lamb>", "ratio<Lamb>")


def take_steps(params: list[Any], **options: Any) -> None:
    for fused in FUSED.values():
        optimizer = fused(params, **options)
        for _ in range(3):
            optimizer.step()


def step_clipped(device: str) -> None:
    """Steps that read gradients first: each chunk is summed, and the last block decides."""
    take_steps(params_of(device, FLOATS, SIZES), max_grad_norm=1.0)


def step_unchecked(device: str) -> None:
    """Steps whose first pass reads no gradient."""
    take_steps(params_of(device, FLOATS, SIZES))


def step_many_tensors(device: str) -> None:
    """More tensors than one launch takes: the last block is that of the last launch."""
    for max_grad_norm in (1.0, 0.0):
        take_steps(params_of(device, (F32,), [3] * 4_100), max_grad_norm=max_grad_norm)


def change_many_groups(device: str) -> None:
    """More groups change at once than fit beside gradients."""
    params = params_of(device, (F32,), [5] * 300)
    optimizer = FusedAdam([{"params": [param]} for param in params], max_grad_norm=1.0)
    for lr in (0.1, 0.2, 0.3):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


def keep_state_in_16_bits(device: str) -> None:
    """Split masters and bfloat16 moments, saved as float32, loaded and split again."""
    params = params_of(device, (F16, BF16), SIZES)
    for rule, fused in FUSED.items():
        optimizer = fused(params, master_weights="split")
        for group in optimizer.param_groups:
            group["moment_dtype"] = BF16
        for stochastic in (False, rule not in ("Sgd", "Adagrad")):
            for group in optimizer.param_groups:
                group["stochastic_rounding"] = stochastic
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())


def keep_moments_in_a_byte(device: str) -> None:
    """Moments in one byte, at random and to nearest, saved as float32, loaded and encoded again."""
    params = params_of(device, (F16, BF16, F32), [4096, 4099, 70_001])
    for stochastic in (False, True):
        optimizer = FusedAdam(
            params, master_weights=True, moment_dtype=torch.int8, stochastic_rounding=stochastic
        )
        for _ in range(2):
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())


def train(optimizer: FP16_Optimizer, params: list[Any], factor: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    optimizer.backward(sum((param.float() * factor).sum() for param in params))
    optimizer.step()


def skip_steps(device: str) -> None:
    """FP16_Optimizer with gradients of inf and NaN: the loss scale changes, nothing is stepped."""
    params = params_of(device, (F16, F32), SIZES)
    inner = FusedAdam(params, max_grad_norm=1.0)
    optimizer = FP16_Optimizer(
        inner, verbose=False, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 128.0}
    )
    for value in (1.0, float("inf"), 1.0, float("nan"), 1.0):
        train(optimizer, params, torch.tensor(value).to(device))
    assert optimizer.loss_scale == 32.0


def replay_a_graph(device: str) -> None:
    """A captured step, replayed with other gradients and another learning rate."""
    params = params_of(device, (F16, F32), SIZES)
    optimizer = FusedAdam(params, max_grad_norm=1.0)
    optimizer.step()
    if device == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    readback.wait()
    with torch.cuda.graph(graph):
        optimizer.step()
    for lr in (0.1, 0.2):
        for param in params:
            param.grad.mul_(2.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.refresh_hyperparameters()
        graph.replay()


def replay_a_step_over_lists(device: str) -> None:
    """A step of amp_C, which a graph captures with its table; two replays are two steps."""
    lists = [[torch.ones(size, device=device) for size in SIZES] for _ in range(4)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    plain = [[tensor.clone() for tensor in listed] for listed in lists]
    for _ in range(2):
        amp_C.multi_tensor_adam(0, flag, plain, *arguments)
    if device == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amp_C.multi_tensor_adam(0, flag, lists, *arguments)
    for _ in range(2):
        graph.replay()
    for ours, theirs in zip(lists, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))


def read_beyond(device: str) -> None:
    """Give check_ a tensor of 4096 numbers with memory for 16."""
    grad = torch.zeros(4096, device=device)
    grad.untyped_storage().resize_(64)
    sums = torch.zeros(1, dtype=F64, device=device)
    ops.check_([grad], [0], torch.zeros(1, device=device), sums)


@dataclasses.dataclass(frozen=True)
class Program:
    """What to run, and which kernels of csrc/cuda/ it is there for."""

    run: Callable[[str], None]
    kernels: tuple[str, ...]

    def __call__(self, device: str) -> None:
        self.run(device)
        if device != "cpu":
            torch.cuda.synchronize()


OPERATOR_KERNELS = """check tensor_sums unscale unscale_and_sum axpby exponents
    update_scale"""
PROGRAMS = {
    "operators": Program(call_each_operator, tuple(OPERATOR_KERNELS.split())),
    "clipped": Program(step_clipped, ("few_chunks", *EACH_STEP)),
    "unchecked": Program(step_unchecked, ("few_rows", *EACH_STEP)),
    "groups": Program(change_many_groups, ("upload", "few_chunks", "step<Adam>")),
    "split": Program(keep_state_in_16_bits, ("join", "split", *EACH_STEP)),
    "bytes": Program(keep_moments_in_a_byte, ("read_codes", "write_codes", "codes<Adam>")),
    "skipped": Program(skip_steps, ("few_chunks", "step<Adam>", "unscale")),
    "graph": Program(replay_a_graph, ("few_chunks", "step<Adam>")),
    "lists": Program(replay_a_step_over_lists, ("upload", "few_rows", "step<Adam>")),
    "tensors": Program(step_many_tensors, ("chunks", "rows", *EACH_STEP)),
}
BEYOND = {"beyond": Program(read_beyond, ("check",))}
# Those that are captured need torch's caching allocator.
IN_GRAPHS = ["graph", "lists"]
GROUPS = {"graphs": IN_GRAPHS, "eager": [name for name in PROGRAMS if name not in IN_GRAPHS]}


def profiled(program: Program, device: str) -> None:
    """Run a program; raise AssertionError if a kernel that it is for did not run."""
    from torch.profiler import ProfilerActivity, profile

    others = torch.zeros(1, device=device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        # A session of the profiler can lose its first kernels (pytorch #192021).
        for _ in range(1000):
            others.add_(1.0)
        program(device)
    ran = {event.name for event in profiler.events()}
    for kernel in program.kernels:
        assert any(is_kernel(kernel, name) for name in ran), f"{kernel} did not run"


def is_kernel(kernel: str, name: str) -> bool:
    """Whether a name that the profiler says is that of a kernel, such as "step<Adam>"."""
    base, _, rule = kernel.rstrip(">").partition("<")
    wanted = rf"::{base}_kernel" + (rf"<(\w+::)*{rule}\b" if rule else r"\b(?!<)")
    return re.search(wanted, name) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    known = [*PROGRAMS, *BEYOND, *GROUPS]
    parser.add_argument("names", nargs="*", help=f"some of {known} [all but beyond]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="see which kernels run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after that")
    args = parser.parse_args()
    status, end = 0, time.monotonic() + args.seconds
    for name in [each for given in args.names or PROGRAMS for each in GROUPS.get(given, [given])]:
        program, start = {**PROGRAMS, **BEYOND}[name], time.monotonic()
        if start > end:
            print(f"{name}: no time was left", flush=True)
            continue
        try:
            profiled(program, args.device) if args.profile else program(args.device)
        except Exception:
            traceback.print_exc()
            status = 1
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
