"""A step whose gradients hold inf or NaN is skipped: only the scale changes, and it says why."""

import warnings
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    INF,
    NAN,
    PROBES,
    assert_grads,
    assert_same,
    differ,
    everything,
    faces,
    grads_used,
    master_grads,
    ones,
    parameter,
    passes_over,
    probes,
    pull,
)

from apex_mp import fp16_utils, optimizers
from apex_mp.core import readback
from apex_mp.optimizers import FusedAdam

UTILS, FUSED = fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer

MIX = (F16, F32, BF16)
SCALINGS: dict[str, dict[str, Any]] = {
    "static": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}},
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
INNERS: dict[str, Any] = {
    "fused": lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1, max_grad_norm=1.0),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
inners = pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())


def mixed(device: torch.device) -> list[torch.nn.Parameter]:
    return [ones(2, 3, dtype=dtype, device=device) for dtype in MIX]


def poisoned(params: list[Any], where: int, value: float) -> list[tuple[Any, Any]]:
    """Gradients of 1, but for one element of one parameter."""
    pairs = []
    for index, param in enumerate(params):
        grad = torch.ones(param.shape)
        if index == where:
            grad[-1, -1] = value
        pairs.append((param, grad))
    return pairs


@faces
@inners
@scalings
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("where", range(len(MIX)), ids=["in fp16", "in fp32", "in bf16"])
@pytest.mark.parametrize("update", [True, False], ids=["update", "no update"])
def test_an_overflow_changes_nothing_but_the_scale(
    update: bool,
    where: int,
    value: float,
    scaling: dict[str, Any],
    inner: Any,
    face: Any,
    device: torch.device,
) -> None:
    params = mixed(device)
    optimizer = face(inner(params), verbose=False, **scaling)
    # Once before there is any state, once after.
    for _ in range(2):
        before = everything(optimizer, *params)
        optimizer.zero_grad()
        optimizer.backward(pull(*poisoned(params, where, value)), update_master_grads=update)
        scale = optimizer.loss_scale
        assert optimizer.step() is None
        assert optimizer.overflow is True
        assert optimizer.loss_scale == (scale / 2 if optimizer.dynamic_loss_scale else scale)
        assert_same(everything(optimizer, *params), before)
        optimizer.zero_grad()
        optimizer.backward(pull(*((param, 1.0) for param in params)), update_master_grads=update)
        optimizer.step()
        assert optimizer.overflow is False
        assert differ(everything(optimizer, *params), before)


@faces
@probes
@scalings
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
def test_finite_gradients_whose_sum_is_infinite_are_no_overflow(
    dtype: torch.dtype, scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    largest = torch.finfo(dtype).max
    weight = ones(64, dtype=dtype, device=device)
    optimizer = face(probe([weight], lr=0.25, weight_decay=0.0), verbose=False, **scaling)
    assert optimizer.loss_scale == 128.0  # So the gradient is taken for a scaled one.
    weight.grad = torch.full_like(weight, largest)
    assert not bool(weight.grad.sum().isfinite())
    optimizer.update_master_grads()
    assert optimizer.overflow is False
    optimizer.step()
    assert optimizer.overflow is False
    assert optimizer.loss_scale == 128.0
    assert_grads(grads_used(optimizer), largest / 128.0)


@faces
@probes
@pytest.mark.parametrize("where", range(len(MIX)), ids=["in fp16", "in fp32", "in bf16"])
def test_an_overflow_leaves_every_other_gradient_unscaled(
    where: int, probe: Any, face: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in MIX]
    optimizer = face(probe(params), 128.0, verbose=False)
    others = [index for index in range(len(MIX)) if index != where]
    for count in (1, 2):  # The second backward adds to what the first has left.
        optimizer.backward(pull(*((p, INF if i == where else 3.0) for i, p in enumerate(params))))
        assert optimizer.overflow is True
        shown = master_grads(optimizer)
        assert_grads([shown[index] for index in others], 3.0 * count, 3.0 * count)


@faces
@probes
@scalings
def test_a_gradient_beyond_float16_is_an_overflow(
    scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), verbose=False, **scaling)
    optimizer.backward(pull((weight, 1024.0)))  # 1024 * 128 > 65504
    optimizer.step()
    assert optimizer.overflow is True
    optimizer.zero_grad()
    optimizer.backward(pull((weight, 256.0)))
    optimizer.step()
    assert optimizer.overflow is False
    assert_grads(grads_used(optimizer), 256.0)


@probes
@scalings
@pytest.mark.parametrize("order", ["first", "last"])
def test_an_overflow_in_one_of_several_backward_calls_skips_the_step(
    order: str, scaling: dict[str, Any], probe: Any, device: torch.device
) -> None:
    for where in range(len(MIX)):
        params = mixed(device)
        optimizer = UTILS(probe(params), verbose=False, **scaling)
        before = everything(optimizer, *params)
        good = [(param, 1.0) for param in params]
        bad = poisoned(params, where, INF)
        for pairs in [bad, good] if order == "first" else [good, bad]:
            optimizer.backward(pull(*pairs))
        assert optimizer.step() is None
        assert optimizer.overflow is True
        assert_same(everything(optimizer, *params), before)


@faces
@probes
@scalings
@pytest.mark.parametrize("constant", [NAN, INF])
def test_a_loss_that_is_not_finite_is_no_overflow_if_gradients_are(
    constant: float, scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(probe(params), verbose=False, **scaling)
    optimizer.backward(pull(*((param, 3.0) for param in params)) + constant)
    optimizer.step()
    assert optimizer.overflow is False
    assert optimizer.loss_scale == 128.0
    assert_grads(grads_used(optimizer), 3.0, 3.0, 3.0)


@faces
@probes
@pytest.mark.parametrize("update", [True, False])
def test_overflow_tells_before_the_step_and_after(
    update: bool, probe: Any, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(probe(params), 128.0, verbose=False)
    assert optimizer.overflow is False
    for value, expected in ((INF, True), (1.0, False), (NAN, True)):
        optimizer.zero_grad()
        optimizer.backward(pull(*poisoned(params, 0, value)), update_master_grads=update)
        assert optimizer.overflow is expected
        optimizer.step()
        assert optimizer.overflow is expected


@faces
@probes
def test_the_overflow_of_a_step_does_not_stick_to_the_next(
    probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), 128.0, verbose=False)
    optimizer.backward(pull((weight, INF)))
    optimizer.step()
    optimizer.zero_grad()
    (pull((weight, 3.0)) * 128.0).backward()  # Not our backward.
    optimizer.step()
    assert optimizer.overflow is False
    assert_grads(grads_used(optimizer), 3.0)


@faces
@probes
def test_overflow_may_be_written(probe: Any, face: Any, device: torch.device) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), 128.0, verbose=False)
    optimizer.overflow = True
    assert optimizer.overflow is True
    optimizer.overflow = False
    assert optimizer.overflow is False


@pytest.mark.parametrize("by_data", [False, True], ids=["grad", "grad.data"])
@faces
@probes
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_edit_that_is_not_finite_does_not_reach_the_weights(
    by_data: bool, value: float, probe: Any, face: Any, device: torch.device
) -> None:
    for dtype in (F16, F32):
        weight = ones(2, dtype=dtype, device=device)
        optimizer = face(probe([weight]), 128.0, verbose=False)
        optimizer.backward(pull((weight, 1.0)))
        grad = optimizer.param_groups[0]["params"][0].grad
        (grad.data if by_data else grad).mul_(value)
        assert optimizer.step() is None
        assert bool((weight == 1.0).all())


@faces
@probes
def test_a_hook_that_makes_gradients_infinite_does_not_reach_the_weights(
    probe: Any, face: Any, device: torch.device
) -> None:
    for dtype in (F16, F32):
        weight = ones(2, dtype=dtype, device=device)
        optimizer = face(probe([weight]), 128.0, verbose=False)

        def spoil(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.param_groups[0]["params"][0].grad.fill_(INF)

        optimizer.register_step_pre_hook(spoil)
        optimizer.backward(pull((weight, 1.0)))
        assert optimizer.step() is None
        assert optimizer.overflow
        assert bool((weight == 1.0).all())


@faces
@probes
def test_an_overflow_is_over_once_its_gradients_are_cleared(
    probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), **SCALINGS["dynamic"], verbose=False)
    optimizer.backward(pull((weight, INF)))
    optimizer.step()
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 64.0)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert (optimizer.overflow, optimizer.loss_scale) == (False, 64.0)


# What is printed: by the text of 2019, and then where.


def run_one(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()
    readback.wait()  # A GPU tells later, unless it is asked to.


@probes
def test_fp16_utils_prints_the_old_message_and_where(
    probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = mixed(device)
    optimizer = UTILS(
        probe(params), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**15}
    )
    capsys.readouterr()
    pairs = poisoned(params, 0, NAN)
    pairs[0][1][0, :2] = torch.tensor([INF, -INF])
    pairs[1][1][0, 0] = INF
    run_one(optimizer, pull(*pairs))
    assert capsys.readouterr().out == (
        "OVERFLOW! Skipping step. Attempted loss scale: 32768.0, reducing to 16384.0\n"
        "  group 0, parameter 0 [2, 3]: 2 inf, 1 NaN\n"
        "  group 0, parameter 1 [2, 3]: 1 inf, 0 NaN\n"
    )


@probes
def test_fp16_utils_does_not_say_that_a_static_scale_is_reduced(
    probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = mixed(device)
    optimizer = UTILS(probe(params), 128.0)
    capsys.readouterr()
    run_one(optimizer, pull(*poisoned(params, 2, INF)))
    assert capsys.readouterr().out == (
        "OVERFLOW! Skipping step. Attempted loss scale: 128.0\n"
        "  group 0, parameter 2 [2, 3]: 1 inf, 0 NaN\n"
    )


@probes
@scalings
def test_the_fused_one_prints_its_own_old_message_and_where(
    scaling: dict[str, Any], probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = mixed(device)
    optimizer = FUSED(probe(params), **scaling)
    assert capsys.readouterr().out == ""
    kind = "dynamic" if optimizer.dynamic_loss_scale else "static"
    for iteration, value in enumerate((1.0, NAN, 1.0, INF)):
        scale = optimizer.loss_scale
        run_one(optimizer, pull(*poisoned(params, 1, value)))
        where = "1 inf, 0 NaN" if value == INF else "0 inf, 1 NaN"
        assert capsys.readouterr().out == (
            ""
            if value == 1.0
            else f"\nGrad overflow on iteration {iteration}\n"
            f"Using {kind} loss scale of {scale}\n"
            f"  group 0, parameter 1 [2, 3]: {where}\n"
        )


@probes
def test_fp16_utils_tells_what_it_wraps(
    probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    UTILS(probe([{"params": [ones(2, 3)]}, {"params": [ones(4, dtype=F32)]}]))
    assert capsys.readouterr().out == (
        "FP16_Optimizer processing param group 0:\n"
        "FP16_Optimizer received torch.HalfTensor with torch.Size([2, 3])\n"
        "FP16_Optimizer processing param group 1:\n"
        "FP16_Optimizer received torch.FloatTensor with torch.Size([4])\n"
    )


@faces
@probes
@scalings
def test_nothing_is_printed_if_verbose_is_false(
    scaling: dict[str, Any],
    probe: Any,
    face: Any,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = mixed(device)
    optimizer = face(probe(params), verbose=False, **scaling)
    optimizer.backward(pull(*poisoned(params, 0, INF)))
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.clip_master_grads(1.0) == -1
    optimizer.step()
    assert optimizer.overflow
    assert capsys.readouterr() == ("", "")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 2).half()
        self.norm = torch.nn.LayerNorm(2)
        self.last = torch.nn.Linear(2, 5).half()


@probes
@pytest.mark.parametrize("known_by", ["model", "named_parameters", "both"])
def test_a_message_names_parameters_if_names_are_known(
    known_by: str, probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model().to(device)
    named = known_by != "model"
    params = list(model.named_parameters() if named else model.parameters())
    optimizer = UTILS(probe(params), 128.0, model=None if known_by == "named_parameters" else model)
    capsys.readouterr()
    run_one(optimizer, pull((model.last.bias, INF), (model.norm.weight, NAN)))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  last.bias [5]: 5 inf, 0 NaN",
        "  norm.weight [2]: 0 inf, 2 NaN",
    ]


@probes
def test_the_name_in_the_model_wins_and_others_fall_back_on_their_place(
    probe: Any, device: torch.device
) -> None:
    model, stranger = Model().to(device), ones(7, device=device)
    groups = [{"params": list(model.parameters())}, {"params": [ones(1, device=device), stranger]}]
    optimizer = UTILS(probe(groups), 128.0, verbose=False, model=model)
    run_one(optimizer, pull((model.first.weight, INF), (stranger, INF)))
    assert [(found.name, found.shape, found.inf) for found in optimizer.overflow_report] == [
        ("group 1, parameter 1", (7,), 7),
        ("first.weight", (2, 3), 6),
    ]


@probes
def test_a_message_names_the_three_worst_and_counts_the_others(
    probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = [ones(size, device=device) for size in (1, 5, 3, 2, 4)]
    optimizer = UTILS(probe(params), 128.0)
    capsys.readouterr()
    run_one(optimizer, pull(*((param, INF) for param in params)))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  group 0, parameter 1 [5]: 5 inf, 0 NaN",
        "  group 0, parameter 4 [4]: 4 inf, 0 NaN",
        "  group 0, parameter 2 [3]: 3 inf, 0 NaN",
        "  and 2 more parameters",
    ]


@faces
@probes
def test_the_report_is_of_the_last_skipped_step(
    probe: Any, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(probe(params), 128.0, verbose=False)
    assert optimizer.overflow_report == []
    for where, value in ((0, INF), (1, NAN), (2, -INF)):
        run_one(optimizer, pull(*poisoned(params, where, value)))
        (found,) = optimizer.overflow_report
        assert found.name == f"group 0, parameter {where}"
        assert found.shape == (2, 3)
        assert (found.inf, found.nan) == ((0, 1) if value != value else (1, 0))
        run_one(optimizer, pull(*poisoned(params, where, 1.0)))
        assert optimizer.overflow_report == [found]


@probes
def test_only_skipped_steps_pay_for_the_report(probe: Any, device: torch.device) -> None:
    weight = ones(1000, device=device)
    optimizer = UTILS(probe([weight]), 128.0, verbose=False)
    for value, expected in ((1.0, 0), (INF, 1), (1.0, 0)):
        optimizer.zero_grad()
        optimizer.backward(pull((weight, value)))
        with passes_over(1000) as names:
            optimizer.step()
            readback.wait()
        looked = [name for name in names if "isnan" in name or "isinf" in name or "::ne" in name]
        assert (len(looked) > 0) == expected


# Endless overflow.


@faces
@probes
@scalings
def test_fifty_skipped_steps_in_a_row_warn_once(
    scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), verbose=False, **scaling)
    good, bad = (lambda: pull((weight, 1.0))), (lambda: pull((weight, INF)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(49):
            run_one(optimizer, bad())
        run_one(optimizer, good())
        for _ in range(49):
            run_one(optimizer, bad())
        assert caught == []
        run_one(optimizer, bad())
        assert len(caught) == 1
        for _ in range(60):
            run_one(optimizer, bad())
        assert len(caught) == 1
        run_one(optimizer, good())
        for _ in range(50):
            run_one(optimizer, bad())
        assert len(caught) == 2
    assert caught[0].category is RuntimeWarning
    assert "50 steps in a row" in str(caught[0].message)
    assert "group 0, parameter 0 [2]: 2 inf, 0 NaN" in str(caught[0].message)
    assert caught[0].filename == __file__  # The line that called step().


@faces
@probes
def test_an_endless_overflow_stops_at_scale_1(probe: Any, face: Any, device: torch.device) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), dynamic_loss_scale=True, verbose=False)
    for _ in range(40):
        run_one(optimizer, pull((weight, INF)))
    assert optimizer.loss_scale == 1.0


@faces
@probes
def test_hysteresis_lets_the_scale_stand_for_some_overflows(
    probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(
        probe([weight]),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "hysteresis": 3, "scale_window": 4},
        verbose=False,
    )
    scales = []
    for value in (INF, 1.0, INF, 1.0, INF, INF, 1.0, 1.0, 1.0, 1.0, INF, INF, INF):
        before = everything(optimizer)
        run_one(optimizer, pull((weight, value)))
        assert differ(everything(optimizer), before) == (value == 1.0)  # Every overflow skips.
        scales.append(optimizer.loss_scale)
    assert scales == [64, 64, 64, 64, 32, 32, 32, 32, 32, 64, 64, 64, 32]


def test_the_scale_grows_after_a_window_of_good_steps(device: torch.device) -> None:
    weight = parameter([1.0], F16, device)
    optimizer = UTILS(
        PROBES["fused"]([weight]),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 4.0, "scale_factor": 4.0, "scale_window": 3},
        verbose=False,
    )
    scales = []
    for value in (1.0, 1.0, 1.0, 1.0, INF, 1.0, 1.0, 1.0):
        run_one(optimizer, pull((weight, value)))
        scales.append(optimizer.loss_scale)
    assert scales == [4, 4, 16, 16, 4, 4, 4, 16]
