"""Masters: whose they are, what their `.grad` shows, and that edits of them count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    STEPS_TO_COUNT_PASSES,
    assert_grads,
    faces,
    grads_used,
    master_grads,
    ones,
    parameter,
    passes_over,
    probes,
    pull,
    wrap,
)

from apex_mp.optimizers import FusedAdam

SGD = torch.optim.SGD


def masters_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# Which parameters have masters.


@faces
@probes
def test_low_precision_parameters_get_masters_in_place(
    probe: Any, face: Any, device: torch.device
) -> None:
    values = [[1.5, -2.25], [3.0], [0.1, 0.2, 0.3], [4.0]]
    params = [
        parameter(value, dtype, device)
        for value, dtype in zip(values, (F16, F32, BF16, F64), strict=True)
    ]
    frozen = ones(2, device=device).requires_grad_(False)
    inner = probe([*params[:2], frozen, *params[2:]])
    group, listed = inner.param_groups[0], inner.param_groups[0]["params"]
    optimizer = wrap(inner, face)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.param_groups[0] is group
    assert group["params"] is listed
    half, single, still, bfloat, double = listed
    assert single is params[1]
    assert still is frozen
    assert double is params[3]
    for master, param in ((half, params[0]), (bfloat, params[2])):
        assert isinstance(master, torch.nn.Parameter)
        assert master is not param
        assert master.dtype == F32
        assert master.requires_grad
        assert master.device == param.device
        assert torch.equal(master, param.float())
    assert optimizer.fp16_groups == [[params[0], params[2]]]
    assert optimizer.fp32_from_fp16_groups == [[half, bfloat]]
    assert optimizer.fp32_from_fp32_groups == [[params[1], params[3]]]
    assert optimizer.all_fp16_params == [params[0], params[2]]
    assert optimizer.all_fp32_from_fp16_params == [half, bfloat]
    assert optimizer.all_fp32_from_fp32_params == [params[1], params[3]]


@faces
@probes
def test_a_group_may_be_empty(probe: Any, face: Any, device: torch.device) -> None:
    weight = ones(2, device=device)
    groups = [{"params": []}, {"params": [weight]}, {"params": []}]
    optimizer = wrap(probe(groups, lr=0.25, weight_decay=0.0), face)
    for expected in (0.75, 0.5):
        optimizer.zero_grad()
        optimizer.backward(pull((weight, 1.0)))
        assert [len(grads) for grads in optimizer.inspect_master_grad_data()] == [0, 1, 0]
        assert float(optimizer.clip_master_grads(100.0)) == pytest.approx(2.0**0.5)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected))
    optimizer.load_state_dict(optimizer.state_dict())
    assert [flat.numel() for flat in optimizer.fp32_groups_flat] == [0, 2, 0]
    assert [flat.numel() for flat in optimizer.fp16_groups_flat] == [0, 2, 0]


CASTS: dict[str, Callable[[torch.nn.Module], object]] = {
    "half": lambda model: model.half(),
    "float and half": lambda model: model.float().half(),
    "other memory": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "bfloat16": lambda model: model.bfloat16(),
}


@faces
@probes
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_model_that_is_moved_or_cast_after_wrapping_is_still_trained(
    cast: Any, probe: Any, face: Any, device: torch.device
) -> None:
    model = torch.nn.Linear(2, 1, bias=False, device=device).half()
    optimizer = wrap(probe(model.parameters(), lr=0.25, weight_decay=0.0), face)
    (master,) = masters_of(optimizer)
    start = master.detach().clone()
    for count in (1, 2):
        cast(model)
        optimizer.zero_grad()
        optimizer.backward(pull((model.weight, 1.0)))
        optimizer.step()
        torch.testing.assert_close(master.detach(), start - 0.25 * count)
        assert torch.equal(model.weight, master.to(model.weight.dtype))


def test_what_the_inner_optimizer_knew_moves_to_the_masters(device: torch.device) -> None:
    weight, own = ones(2, device=device), ones(2, dtype=F32, device=device)
    inner = SGD([weight, own], lr=2.0**-4, momentum=0.5)
    pull((weight, 1.0), (own, 1.0)).backward()
    inner.step()
    optimizer = wrap(inner)
    master = masters_of(optimizer)[0]
    assert weight not in optimizer.state
    assert optimizer.state[master]["momentum_buffer"].dtype == F32
    optimizer.zero_grad()
    optimizer.backward(pull((weight, 1.0), (own, 1.0)))
    optimizer.step()
    assert_grads([master, own], 1 - (1 + 1.5) * 2.0**-4, 1 - (1 + 1.5) * 2.0**-4)


# Gradients of masters.


@faces
@probes
def test_inspection_shows_every_group_and_none_after_an_overflow(
    probe: Any, face: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (ones(2, dtype=dtype, device=device) for dtype in (F16, F32, F16))
    optimizer = wrap(probe([{"params": [a, b]}, {"params": [c]}]), face, verbose=True)
    capsys.readouterr()
    optimizer.backward(pull((a, 1.0), (b, 2.0)), update_master_grads=False)
    first, second = optimizer.inspect_master_grad_data()
    assert_grads(first, 1.0, 2.0)
    assert_grads(second, None)
    assert capsys.readouterr().out == ""
    optimizer.zero_grad()
    optimizer.backward(pull((a, INF)))
    assert optimizer.inspect_master_grad_data() is None
    assert capsys.readouterr().out == (
        "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.  "
        "Gradients are currently invalid (may be inf, nan, or stale).  Returning None.\n"
    )


@faces
@probes
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["old name", "new name", "position"])
def test_zero_grad_takes_the_wish_by_either_name(
    by: str, to_none: bool, probe: Any, face: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params), face)
    optimizer.backward(pull(*((param, 3.0) for param in params)))
    if by == "position":
        optimizer.zero_grad(to_none)
    else:
        optimizer.zero_grad(**{"set_grads_to_None" if by == "old name" else "set_to_none": to_none})
    expected = [None, None] if to_none else [0.0, 0.0]
    assert_grads([param.grad for param in params], *expected)
    assert_grads(master_grads(optimizer), *expected)


# Masters as one vector.


@faces
@probes
def test_each_group_has_its_masters_in_one_vector(
    probe: Any, face: Any, device: torch.device
) -> None:
    a, b = parameter([1.0, 2.0], F16, device), parameter([[3.0], [4.0]], F16, device)
    own, c = parameter([9.0], F32, device), parameter([5.0], BF16, device)
    alone = ones(1, dtype=F32, device=device)
    optimizer = wrap(probe([{"params": [a, own, b]}, {"params": [c]}, {"params": [alone]}]), face)
    flats = optimizer.fp32_groups_flat
    assert [flat.tolist() for flat in flats] == [[1.0, 2.0, 3.0, 4.0], [5.0], []]
    assert all(flat.dtype == F32 and flat.dim() == 1 for flat in flats)
    assert optimizer.fp32_groups_flat[0] is flats[0]
    masters = masters_of(optimizer)
    assert masters[0].data_ptr() == flats[0].data_ptr()
    assert masters[2].data_ptr() == flats[0][2:].data_ptr()
    assert [flat.tolist() for flat in optimizer.fp16_groups_flat] == [
        [1.0, 2.0, 3.0, 4.0],
        [5.0],
        [],
    ]


@probes
def test_loading_a_model_and_copying_it_to_the_masters_as_old_code_does(
    probe: Any, device: torch.device
) -> None:
    weight = ones(3, device=device)
    optimizer = wrap(probe([weight], lr=0.25, weight_decay=0.0))
    weight.data.fill_(4.0)
    for master, model in zip(
        optimizer.all_fp32_from_fp16_params, optimizer.all_fp16_params, strict=True
    ):
        master.data.copy_(model.data)
    optimizer.backward(pull((weight, 1.0)))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 3.75))


# Groups and parameters that come later.


@faces
@probes
def test_a_refused_group_changes_nothing(probe: Any, face: Any, device: torch.device) -> None:
    weight = ones(2, device=device)
    optimizer = wrap(probe([weight]), face)
    complex_one = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    with pytest.raises(TypeError, match=r"params\[1\]\[1\] is of dtype torch\.complex64"):
        optimizer.add_param_group({"params": [ones(1, device=device), complex_one]})
    assert len(optimizer.param_groups) == 1
    optimizer.backward(pull((weight, 3.0)))
    optimizer.step()
    assert_grads(grads_used(optimizer), 3.0)


@faces
@probes
def test_masters_can_be_exported(
    probe: Any, face: Any, device: torch.device, tmp_path: Any
) -> None:
    optimizer = wrap(probe([parameter([1.5, 2.5], F16, device)]), face)
    optimizer.backward(pull((optimizer.all_fp16_params[0], 1.0)))
    torch.save(optimizer.fp32_from_fp16_groups, tmp_path / "masters.pt")
    ((master,),) = torch.load(tmp_path / "masters.pt", weights_only=False)
    assert master.tolist() == [1.5, 2.5]


@pytest.mark.cpu_only  # the names of passes
@pytest.mark.cpu_only  # the names of passes
def test_masters_gradients_cost_nothing_unlooked_at(device: torch.device) -> None:
    params = [ones(1000, device=device) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    optimizer = wrap(FusedAdam(groups, max_grad_norm=1.0))
    for _ in range(STEPS_TO_COUNT_PASSES):
        optimizer.zero_grad(set_to_none=True)
        loss = pull(*((param, 1.0) for param in params))
        with passes_over(1000) as names:
            loss.backward()
        torch_alone = list(names)
        optimizer.zero_grad(set_to_none=True)
        loss = pull(*((param, 1.0) for param in params))
        with passes_over(1000) as names:
            optimizer.backward(loss)
        in_backward = list(names)
        with passes_over(1000) as names:
            optimizer.step()
    assert sorted(in_backward) == sorted(torch_alone)
    assert names == ["apex_mp::check_pass", "apex_mp::adam_pass"]


@faces
@probes
def test_writes_to_the_vector_are_seen_by_step_and_model(
    probe: Any, face: Any, device: torch.device
) -> None:
    a, b = ones(2, device=device), ones(2, 2, device=device)
    optimizer = wrap(probe([a, b], lr=0.25, weight_decay=0.0), face)
    for start in (8.0, 16.0):
        optimizer.fp32_groups_flat[0].fill_(start)
        assert all(bool((master == start).all()) for master in masters_of(optimizer))
        optimizer.zero_grad()
        optimizer.backward(pull((a, 1.0)))  # b has no gradient, but is written too.
        optimizer.step()
        torch.testing.assert_close(a.detach(), torch.full_like(a, start - 0.25))
        assert bool((b == start).all())
