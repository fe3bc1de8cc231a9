"""multi_tensor_applier and the compiled modules of apex, in their old calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from waits import Waits

from apex_mp.multi_tensor_apply import (
    MultiTensorApply,
    amp_C,
    apex_C,
    fused_adam_cuda,
    multi_tensor_applier,
)
from apex_mp.optimizers import FusedAdagrad, FusedLAMB, FusedNovoGrad

INF = float("inf")


@pytest.fixture
def flag(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def tensors(device: torch.device, *values: float, dtype: Any = torch.float32) -> list[Tensor]:
    return [torch.full((3,), value, device=device, dtype=dtype) for value in values]


def test_the_applier_hands_the_chunk_size_and_all_else_on(flag: Tensor) -> None:
    assert multi_tensor_applier.available
    assert not multi_tensor_applier.warned
    assert multi_tensor_applier.chunk_size == 2048 * 32
    called = MultiTensorApply(7)(lambda *args: args, flag, [[flag]], 1.0, 2)
    assert called == (7, flag, [[flag]], 1.0, 2)


def test_scale_writes_products_across_dtypes_and_leaves_the_flag(
    flag: Tensor, device: torch.device
) -> None:
    inputs = tensors(device, 2.0, 4.0, dtype=torch.float16)
    outputs = tensors(device, 0.0, 0.0)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [inputs, outputs], 0.5)
    assert [out.tolist() for out in outputs] == [[1.0] * 3, [2.0] * 3]
    assert flag.tolist() == [0]


def test_scale_passes_inf_on_and_raises_the_flag_for_good(
    flag: Tensor, device: torch.device
) -> None:
    bad = tensors(device, 1.0, INF)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [bad, bad], 2.0)
    assert flag.tolist() == [1]
    assert [t[0].item() for t in bad] == [2.0, INF]
    good = tensors(device, 1.0)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [good, good], 2.0)
    assert (flag.tolist(), good[0].tolist()) == ([1], [2.0] * 3)


@pytest.mark.parametrize(("checked", "raised"), [(-1, 1), (0, 0), (1, 1)])
def test_axpby_looks_for_inf_where_it_is_asked_to(
    checked: int, raised: int, flag: Tensor, device: torch.device
) -> None:
    x, y, out = tensors(device, 1.0), tensors(device, INF), tensors(device, 0.0)
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [x, y, out], 2.0, 1.0, checked)
    assert (flag.item(), out[0].tolist()) == (raised, [INF] * 3)


@pytest.mark.parametrize("per_tensor", [None, False, True])
def test_l2norm_returns_a_vector_of_one_and_norms_on_request(
    per_tensor: bool | None, flag: Tensor, device: torch.device
) -> None:
    lists = [[torch.tensor([3.0], device=device), torch.tensor([4.0, 0.0], device=device)]]
    args = () if per_tensor is None else (per_tensor,)
    norm, norms = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, lists, *args)
    assert (norm.tolist(), norm.dtype, flag.item()) == ([5.0], torch.float32, 0)
    assert norms.tolist() == ([3.0, 4.0] if per_tensor else [])


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_takes_the_steps_of_torch(mode: int, flag: Tensor, device: torch.device) -> None:
    ours = [torch.randn(5, device=device), torch.randn(2, device=device)]
    theirs = [torch.nn.Parameter(param.clone()) for param in ours]
    make = torch.optim.AdamW if mode else torch.optim.Adam
    optimizer = make(theirs, lr=0.1, weight_decay=0.01, foreach=False)
    moments = [[torch.zeros_like(param) for param in ours] for _ in range(2)]
    for step in (1, 2, 3):
        for param in theirs:
            param.grad = torch.randn_like(param)
        optimizer.step()
        lists = [[param.grad for param in theirs], ours, *moments]
        rest = (0.1, 0.9, 0.999, 1e-8, step, mode, 1, 0.01)
        multi_tensor_applier(amp_C.multi_tensor_adam, flag, lists, *rest)
    for mine, param in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, param.detach())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_the_steps_of_torch_and_writes_the_copy(
    momentum: float, nesterov: bool, flag: Tensor, device: torch.device
) -> None:
    if nesterov and not momentum:
        nesterov = False
    ours = [torch.randn(5, device=device)]
    theirs = [torch.nn.Parameter(ours[0].clone())]
    optimizer = torch.optim.SGD(
        theirs, lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.01
    )
    buffers, copies = [torch.zeros_like(ours[0])], [torch.zeros(5, device=device).half()]
    for step in range(3):
        theirs[0].grad = torch.randn(5, device=device)
        optimizer.step()
        scaled = [theirs[0].grad * 128]
        rest = (0.01, momentum, 0.0, 0.1, nesterov, step == 0, False, 1 / 128)
        lists = [scaled, ours, buffers, copies]
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag, lists, *rest)
    torch.testing.assert_close(ours[0], theirs[0].detach())
    assert torch.equal(copies[0], ours[0].half())


# The other steps of amp_C, against the optimizers here.


def in_step(
    made: type[Any],
    options: dict[str, Any],
    call: Any,
    device: torch.device,
    *state: str,
    same: Any = torch.equal,
) -> None:
    """Take three steps with an optimizer and with a function, and compare parameters and state."""
    theirs = [Parameter(torch.randn(5, device=device)), Parameter(torch.randn(2, 3, device=device))]
    ours = [param.detach().clone() for param in theirs]
    optimizer = made(theirs, **options)
    lists = [[torch.zeros_like(param) for param in ours] for _ in state]
    for step in (1, 2, 3):
        for param in theirs:
            param.grad = torch.randn_like(param)
        optimizer.step()
        call(step, [[param.grad for param in theirs], ours, *lists])
    for mine, param in zip(ours, theirs, strict=True):
        assert same(mine, param.detach())
    for listed, name in zip(lists, state, strict=True):
        for mine, param in zip(listed, theirs, strict=True):
            assert same(mine, optimizer.state[param][name])


@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad_takes_the_steps_of_the_optimizer(
    mode: int, flag: Tensor, device: torch.device
) -> None:
    def call(step: int, lists: Any) -> None:
        multi_tensor_applier(amp_C.multi_tensor_adagrad, flag, lists, 0.1, 1e-3, mode, 0.01)

    options = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.01, "adagrad_w_mode": mode == 1}
    in_step(FusedAdagrad, options, call, device, "sum")


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm_type", [0, 2])
def test_novograd_takes_the_steps_of_the_optimizer_and_keeps_norms_in_a_vector(
    mode: int, norm_type: int, flag: Tensor, device: torch.device
) -> None:
    norms = torch.zeros(2, device=device)

    def call(step: int, lists: Any) -> None:
        rest = (norms, 0.1, 0.9, 0.8, 1e-3, step, 1, 0.01, 1, mode, norm_type)
        multi_tensor_applier(amp_C.multi_tensor_novograd, flag, lists, *rest)

    options = {"lr": 0.1, "betas": (0.9, 0.8), "eps": 1e-3, "weight_decay": 0.01}
    options |= {"reg_inside_moment": mode == 0, "norm_type": norm_type, "init_zero": True}
    in_step(FusedNovoGrad, options, call, device, "exp_avg")
    assert (norms > 0).all()


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
def test_lamb_takes_the_steps_of_the_optimizer_clipped_by_the_norm_of_all(
    mode: int, measured: bool, flag: Tensor, device: torch.device
) -> None:
    def call(step: int, lists: Any) -> None:
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in lists[0]]).double())
        clip = (0.5,) if measured else (norm, 0.5)  # As in 2019, or later.
        rest = (0.1, 0.9, 0.8, 1e-3, step, 1, 0.01, 1, mode, *clip)
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag, lists, *rest)

    options = {"lr": 0.1, "betas": (0.9, 0.8), "eps": 1e-3, "weight_decay": 0.01}
    options |= {"max_grad_norm": 0.5, "adam_w_mode": mode == 1}
    # A norm that is given is rounded otherwise than one that is measured.
    same = torch.equal if measured else torch.allclose
    in_step(FusedLAMB, options, call, device, "exp_avg", "exp_avg_sq", same=same)


@pytest.mark.parametrize("master", [False, True])
def test_the_capturable_adam_reads_its_numbers_from_tensors(
    master: bool, flag: Tensor, device: torch.device
) -> None:
    params = tensors(device, 1.0, 2.0, dtype=torch.float16 if master else torch.float32)
    stepped = [param.float() for param in params] if master else params
    plain = [param.float() for param in params]
    grads = [torch.randn(3, device=device).to(param.dtype) for param in params]
    moments = [[torch.zeros(3, device=device) for _ in params] for _ in range(4)]
    lr, inv_scale = torch.tensor(0.1, device=device), torch.tensor([0.5], device=device)
    for number in (1, 2, 3):
        step = torch.tensor([number], dtype=torch.int32, device=device)
        rest = (lr, 0.9, 0.999, 1e-8, step, 1, 1, 0.01, inv_scale)
        lists = [grads, params, *moments[:2]]
        if master:
            lists.append(stepped)
            function = amp_C.multi_tensor_adam_capturable_master
        else:
            function = amp_C.multi_tensor_adam_capturable
        before = [grad.clone() for grad in grads]
        with Waits() as waits:
            multi_tensor_applier(function, flag, lists, *rest)
        assert waits.count == 0
        assert all(map(torch.equal, grads, before))
        halves = [grad.float() * 0.5 for grad in grads]
        same = (lr.item(), *rest[1:4], number, *rest[5:8])
        multi_tensor_applier(amp_C.multi_tensor_adam, flag, [halves, plain, *moments[2:]], *same)
    assert all(map(torch.equal, stepped, plain))
    assert all(map(torch.equal, params, [param.to(params[0].dtype) for param in plain]))


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        ([[3]], "holds 1 lists; it must hold 2: inputs, outputs"),
        ([[], []], "inputs is empty"),
        ([[3], [3, 3]], "outputs holds 2 tensors, inputs holds 1"),
        ([[3, 3], [3, 4]], r"outputs\[1\] has 4 elements, inputs\[1\] has 3"),
    ],
)
def test_lists_that_do_not_fit_are_refused_and_nothing_is_written(
    lists: list[list[int]], sentence: str, flag: Tensor, device: torch.device
) -> None:
    made = [[torch.full((size,), INF, device=device) for size in one] for one in lists]
    with pytest.raises(RuntimeError, match=sentence):
        amp_C.multi_tensor_scale(1, flag, made, 0.0)
    assert flag.item() == 0
    assert all(bool(t.isinf().all()) for one in made for t in one)


def ones(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(3, dtype=dtype)]


FLAG = torch.zeros(1, dtype=torch.int32)
ADAM = (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
DTYPES = "it must be float16, bfloat16, float32 or float64"
NO_FLAG = "it must be a tensor of one, such as torch.cuda.IntTensor([0])"


def adam_with(**wrong: Any) -> Any:
    """Call fused_adam_cuda.adam with something wrong."""
    given: dict[str, Any] = {name: torch.ones(3) for name in ("p", "exp_avg", "exp_avg_sq", "grad")}
    given |= {"out_p": torch.tensor([]), "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    given |= {"scale": 1.0, "step": 1, "eps_mode": 1, "bias_correction": 1, "weight_decay": 0.0}
    fused_adam_cuda.adam(**given | wrong)


# (what is called with which arguments, the kind of the refusal, what it says)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: multi_tensor_applier("scale", FLAG, [ones(), ones()], 1.0),  # type: ignore[arg-type]
        TypeError,
        "multi_tensor_applier: op is a str; it must be a function",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, None, 1.0),  # type: ignore[arg-type]
        TypeError,
        "multi_tensor_scale: tensor_lists is a NoneType; it must be a list of lists of tensors: ",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [*ones(), *ones()], 1.0),
        TypeError,
        "multi_tensor_scale: inputs is a Tensor; it must be a list of tensors",
    ),
    (
        lambda: amp_C.multi_tensor_l2norm(1, FLAG, [[None]]),  # type: ignore[list-item]
        TypeError,
        "multi_tensor_l2norm: tensors[0] is a NoneType; it must be a tensor",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [ones(), ones(torch.int32)], 1.0),
        RuntimeError,
        f"multi_tensor_scale: outputs[0] is of dtype torch.int32; {DTYPES}",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [[torch.ones(3, device="meta")], ones()], 1.0),
        RuntimeError,
        "multi_tensor_scale: inputs[0] is on meta, where there are no numbers; it must be",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [[ones()[0].to_sparse()], ones()], 1.0),
        RuntimeError,
        "multi_tensor_scale: inputs[0] is sparse (torch.sparse_coo); it must be dense",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [[torch._neg_view(torch.ones(3))], ones()], 1.0),
        RuntimeError,
        "multi_tensor_scale: inputs[0] is a negative view",
    ),
    (
        lambda: amp_C.multi_tensor_scale(
            1, FLAG, [[torch.ones(3, 2).t()], [torch.ones(2, 3)]], 1.0
        ),
        RuntimeError,
        "multi_tensor_scale: outputs[0] has sizes [2, 3] and strides [3, 1], inputs[0] has",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, None, [ones(), ones()], 1.0),  # type: ignore[arg-type]
        TypeError,
        f"multi_tensor_scale: the overflow flag is a NoneType; {NO_FLAG}",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, torch.zeros(1, device="meta"), [ones(), ones()], 1.0),
        RuntimeError,
        "multi_tensor_scale: the overflow flag is on meta; it must be on a device",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [ones(), ones()], None),  # type: ignore[arg-type]
        TypeError,
        "multi_tensor_scale: scale is None; it must be a number, or a tensor of one element",
    ),
    (
        lambda: amp_C.multi_tensor_scale(1, FLAG, [ones(), ones()], torch.ones(2)),
        RuntimeError,
        "multi_tensor_scale: scale has 2 elements; it must have 1",
    ),
    (
        lambda: amp_C.multi_tensor_axpby(1, FLAG, [ones(), ones(), ones()], 1.0, 1.0, 5),
        ValueError,
        "multi_tensor_axpby: arg_to_check is 5; it must be -1 (both) or 0 (x) or 1 (y)",
    ),
    (
        lambda: amp_C.multi_tensor_adam(1, FLAG, [ones()] * 4, *ADAM[:4], 0, *ADAM[5:]),
        ValueError,
        "multi_tensor_adam: step is 0; the first step is 1",
    ),
    (
        lambda: amp_C.multi_tensor_adam(1, FLAG, [ones()] * 4, *ADAM[:4], "1", *ADAM[5:]),  # type: ignore[arg-type]
        TypeError,
        "multi_tensor_adam: step is '1'; it must be the step's number, from 1",
    ),
    (
        lambda: amp_C.multi_tensor_adam(1, FLAG, [ones()] * 4, *ADAM[:5], 7, *ADAM[6:]),
        ValueError,
        "multi_tensor_adam: mode is 7; it must be 0 (L2) or 1 (AdamW)",
    ),
    (
        lambda: amp_C.multi_tensor_novograd(
            1, FLAG, [ones()] * 3, torch.ones(2), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, 2
        ),
        RuntimeError,
        "multi_tensor_novograd: grad_norms has shape [2]; it must be a vector with one element for",
    ),
    (
        lambda: amp_C.multi_tensor_novograd(
            1, FLAG, [ones()] * 3, torch.ones(1), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, 1
        ),
        ValueError,
        "multi_tensor_novograd: norm_type is 1; it must be 0 (maximum norm) or 2 (l2 norm)",
    ),
    (
        lambda: amp_C.multi_tensor_adam_capturable(
            1, FLAG, [ones()] * 4, *ADAM[:4], 0, *ADAM[5:], 1.0
        ),
        ValueError,
        "multi_tensor_adam_capturable: step is 0; the first step is 1",
    ),
    (
        lambda: amp_C.multi_tensor_adam_capturable_master(
            1, FLAG, [*[ones()] * 4, [torch.ones(3, 2).t()]], *ADAM, 1.0
        ),
        RuntimeError,
        "multi_tensor_adam_capturable_master: master_params[0] has 6 elements, grads[0] has 3",
    ),
    (
        lambda: amp_C.scale_check_overflow(ones(), 1.0, FLAG, torch.ones(3)),  # type: ignore[arg-type]
        TypeError,
        "scale_check_overflow: grads is a list; it must be a tensor",
    ),
    (
        lambda: amp_C.scale_check_overflow(torch.ones(3), 1.0, FLAG, torch.ones(4)),
        RuntimeError,
        "scale_check_overflow: grads has 3 elements, downscaled_grads has 4; they must be as many",
    ),
    (lambda: adam_with(out_p=None), TypeError, "adam: out_p is a NoneType; it must be a tensor"),
    (
        lambda: adam_with(grad=ones(torch.int32)[0]),
        RuntimeError,
        f"grad[0] is of dtype torch.int32; {DTYPES}",
    ),
    (lambda: adam_with(scale=0.0), ValueError, "adam: scale is 0.0; it must not be 0"),
    (
        lambda: adam_with(eps_mode=2),
        ValueError,
        "eps_mode is 2; it must be 0 (under the root) or 1",
    ),
    (lambda: adam_with(step=0), ValueError, "fused_adam_cuda.adam: step is 0; the first step is 1"),
    (
        lambda: apex_C.flatten(torch.ones(3)),  # type: ignore[arg-type]
        TypeError,
        "apex_C.flatten: tensors is a Tensor; it must be a list of them",
    ),
    (
        lambda: apex_C.flatten([None]),  # type: ignore[list-item]
        TypeError,
        "apex_C.flatten: tensors[0] is a NoneType; it must be a tensor",
    ),
    (
        lambda: apex_C.unflatten(ones(), ones()),  # type: ignore[arg-type]
        TypeError,
        "apex_C.unflatten: flat is a list; it must be a tensor, and the second argument the list",
    ),
    (
        lambda: apex_C.unflatten(torch.ones(2, 3), ones()),
        RuntimeError,
        "apex_C.unflatten: flat has 2 dimensions; it must be a vector",
    ),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("call", "kind", "sentence"), WRONG)
def test_a_wrong_argument_is_named_with_its_value_and_the_wish(
    call: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert sentence in str(raised.value)
    assert FLAG.item() == 0


# fused_adam_cuda and apex_C


@pytest.mark.parametrize("eps_mode", [0, 1])
@pytest.mark.parametrize("corrected", [0, 1])
def test_fused_adam_cuda_steps_and_writes_the_copy(
    eps_mode: int, corrected: int, device: torch.device
) -> None:
    p = torch.tensor([1.0], device=device)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    grad = torch.tensor([2.0 * 64], device=device).half()
    out_p = torch.zeros(1, device=device).half()
    fused_adam_cuda.adam(
        p, out_p, m, v, grad, 0.5, 0.9, 0.99, 0.1, 64.0, 1, eps_mode, corrected, 0.25
    )
    exp_avg, exp_avg_sq = (2.0, 4.0) if corrected else (0.2, 0.04)
    denom = (exp_avg_sq + 0.1) ** 0.5 if eps_mode == 0 else exp_avg_sq**0.5 + 0.1
    assert p.item() == pytest.approx(1.0 - 0.5 * 0.25 - 0.5 * exp_avg / denom)
    assert (m.item(), v.item()) == (pytest.approx(0.2), pytest.approx(0.04))
    assert torch.equal(out_p, p.half())


def test_flatten_and_unflatten_are_each_others_way_back(device: torch.device) -> None:
    parts = [torch.arange(6.0, device=device).view(2, 3), torch.tensor(7.0, device=device)]
    flat = apex_C.flatten(parts)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7]
    back = apex_C.unflatten(flat, parts)
    assert [tuple(part.shape) for part in back] == [(2, 3), ()]
    back[0].zero_()
    assert flat.tolist() == [0] * 6 + [7]  # views
