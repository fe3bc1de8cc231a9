"""Moments in one byte: a step is that of float32 moments, which are then rounded to codes."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from fused_adam_cases import copies_of
from rule_cases import copy_master
from test_stochastic_rounding import halves, hashed, in_memory
from tolerances import assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.masters import codes
from apex_mp.optimizers import FusedAdam, FusedAdamW, FusedLAMB

F16, BF16, F32, F64, I8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8
MOMENTS = ("exp_avg", "exp_avg_sq")
# Exponents of numbers in a block, mantissas of 4 bits; the second moment has no sign.
BINADES = (8, 16)
LEAST = codes.LEAST_CODED
Adam = functools.partial(FusedAdam, lr=0.01, weight_decay=0.1, moment_dtype=I8)


def in_blocks(numbers: Tensor) -> Tensor:
    """Rows of 32; what the last one lacks is 0."""
    flat = in_memory(numbers).cpu().to(F64)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 32)).view(-1, 32)


def rounded(which: int, numbers: Tensor, random: Tensor | None) -> Tensor:
    """What codes keep of numbers, in the order of memory; `random` has 16 bits for each."""
    blocks = in_blocks(numbers)
    largest = blocks.abs().amax(1, keepdim=True)
    exponent = largest.frexp().exponent - 1  # of 0: -1, and all are 0
    exponent = exponent + (largest > 31 / 16 * torch.ldexp(torch.ones_like(largest), exponent))
    unit = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=BINADES[which] - 127))
    # All sizes that a block can hold, in units of its largest power of two.
    binades = torch.arange(1 - BINADES[which], 1, dtype=F64)
    held = (2.0 ** binades[:, None] * (1 + torch.arange(16, dtype=F64) / 16)).flatten()
    held[0] = 0.0
    sizes = blocks.abs() / unit
    low = (torch.searchsorted(held, sizes, right=True) - 1).clamp(max=held.numel() - 2)
    way = (sizes - held[low]) / (held[low + 1] - held[low])
    if random is None:
        up = (way > 0.5) | ((way == 0.5) & (low % 2 == 1))
        up_to_least = way > 0.5
    else:
        part = in_blocks(random) * 2.0**-16
        up, up_to_least = way + part >= 1.0, way > part
    is_below = sizes < held[1]
    up = torch.where(is_below, up_to_least if which == 0 else sizes > 0, up)
    kept = held[low + up.long()] * unit * blocks.sign() + 0.0  # There is no -0.
    return kept.flatten()[: numbers.numel()]


def stored(state: Any, which: int) -> Tensor:
    """A moment of a state in float64, in the order of memory."""
    numbers = codes.decoded(MOMENTS[which], which, state)
    return in_memory(numbers).cpu().to(F64)


def spread(shape: Any, seed: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Numbers over many powers of two, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    numbers *= 2.0 ** torch.randint(-12, 3, numbers.shape, generator=generator)
    numbers[torch.rand(numbers.shape, generator=generator) < 0.1] = 0.0
    return numbers.to(device, dtype)


def make_params(device: Any, dtype: torch.dtype) -> list[Parameter]:
    shapes: list[Any] = [(LEAST,), (67, 101), (LEAST - 1,), (0,), (3, 9, 20, 16)]
    params = [Parameter(spread(shape, 100, dtype, device)) for shape in shapes]
    params[-1].data = params[-1].data.to(memory_format=torch.channels_last)
    whole = spread((LEAST + 40,), 101, dtype, device)
    return [*params, Parameter(whole[3 : LEAST + 36])]


def give_grads(params: list[Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    for number, param in enumerate(params):
        grad = spread(param.shape, 10 * step + number, dtype or param.dtype, param.device)
        param.grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad).to(param.dtype)


EDGES = (0.0, 1.0, 1.9375, 1.94, 31 / 32, 2.0**-126, 2.0**-119, 1e-45, 3e38, 1.5 * 2.0**-7)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.usefixtures("cpu_level")
def test_codes_hold_the_nearest_number_of_their_block(which: int, device: torch.device) -> None:
    edges = torch.tensor(EDGES)[:, None] * torch.tensor([1.0, 0.99, 2.0**-7, 1.03125, 2.0**-16])
    blocks = [torch.nn.functional.pad(row, (0, 27)) for row in edges]
    numbers = torch.cat([*blocks, spread((9999,), 1, F32, "cpu")]).to(device)
    numbers = numbers.square().clamp(max=3e38) if which else numbers
    state = codes.encoded(MOMENTS[which], which, numbers, numbers)
    assert_same_bits(stored(state, which), rounded(which, numbers, None))
    again = codes.decoded(MOMENTS[which], which, state)
    twice = codes.encoded(MOMENTS[which], which, again, again)
    assert_same_bits(stored(twice, which), stored(state, which))


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("masters", [False, "float32", True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, "double gradients"])
@pytest.mark.usefixtures("cpu_level")
def test_a_step_is_that_of_float32_moments_rounded(
    dtype: Any, masters: Any, stochastic: bool, device: torch.device
) -> None:
    double, dtype = dtype == "double gradients", F32 if dtype == "double gradients" else dtype
    params = make_params(device, dtype)
    narrow = Adam(params, master_weights=masters, stochastic_rounding=stochastic)
    for step in range(3):
        twins = copies_of(params)
        wide = Adam(twins, master_weights=masters, moment_dtype=F32)
        for param, twin in zip(params, twins, strict=True):
            if param in narrow.state:
                wide.state[twin] = codes.widened(narrow.state[param], MOMENTS)
                wide.state[twin] = copy.deepcopy(wide.state[twin])
            copy_master(narrow, param, wide, twin)
        give_grads(params, step)
        give_grads(twins, step)
        given = [[p.grad.double() if double else p.grad for p in each] for each in (params, twins)]
        narrow.step(grads=given[0])
        wide.step(grads=given[1])
        for position, (param, twin) in enumerate(zip(params, twins, strict=True)):
            assert_same_bits(narrow.master(param), wide.master(twin))
            assert_same_bits(param.detach(), twin.detach())
            state = narrow.state[param]
            for which, name in enumerate(MOMENTS):
                exact = wide.state[twin][name]
                if param.numel() < LEAST:
                    assert_same_bits(state[name], exact)
                    continue
                assert (state[name].dtype, state[name].stride()) == (I8, param.stride())
                random = halves(which, hashed(param.numel(), position, step))
                expected = rounded(which, exact, random if stochastic else None)
                assert_same_bits(stored(state, which), expected)


def test_a_state_takes_two_bytes_and_a_sixteenth_an_element(device: torch.device) -> None:
    param = Parameter(torch.ones(64 * LEAST, dtype=BF16, device=device))
    optimizer = FusedAdamW([param], master_weights=True, moment_dtype=I8)
    param.grad = torch.ones_like(param)
    optimizer.step()
    (remainder,) = optimizer._own_masters.kept.values()
    tensors = (param, param.grad, remainder, *optimizer.state[param].values())
    number = optimizer.state[param]["step"].nbytes
    held = sum(each.nbytes for each in tensors if each is not None) - number
    assert held / param.numel() == 8.0625
    (group,) = optimizer.param_groups
    layout = optimizer._rule.layout_of(group)
    assert layout.bytes_of(param, group) == held - 4 * param.numel()


def test_a_block_with_inf_or_nan_holds_nan_and_no_other_one_does(device: torch.device) -> None:
    param = Parameter(torch.zeros(LEAST, device=device))
    for bad in (torch.inf, torch.nan, -torch.inf):
        optimizer = Adam([param])
        param.grad = torch.ones_like(param)
        param.grad[40] = bad
        optimizer.step()
        for which in (0, 1):
            is_nan = stored(optimizer.state[param], which).isnan()
            assert [*is_nan.nonzero().flatten()] == [*range(32, 64)]


def test_a_skipped_step_changes_no_byte(device: torch.device) -> None:
    params = make_params(device, F16)
    optimizer = Adam(params, master_weights=True)
    scaler = amp.GradScaler(device.type, init_scale=4.0)
    for bad in (False, True, False, True):
        before = copy.deepcopy([params, [*map(optimizer.state.get, params)]])
        scaler.scale(torch.ones((), device=device))
        give_grads(params, 0)
        if bad:
            params[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer) == bad
        for param, value, state in zip(params, *before, strict=True):
            if bad:
                assert_same_bits(param.detach(), value.detach())
                for name, old in state.items():
                    assert torch.equal(old, optimizer.state[param][name])


def train(optimizer: Any, steps: range) -> None:
    for step in steps:
        give_grads(optimizer.param_groups[0]["params"], step)
        optimizer.step()


def through_a_file(optimizer: Any, compact: bool) -> Any:
    other = Adam(copies_of(optimizer.param_groups[0]["params"]), master_weights=True)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict(compact=compact)))
    other.load_state_dict(saved)
    return other


WAYS: dict[str, Any] = {
    "file": functools.partial(through_a_file, compact=False),
    "compact file": functools.partial(through_a_file, compact=True),
    "copy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=[*WAYS])
def test_a_run_goes_on_to_the_bit(way: Any, device: torch.device) -> None:
    params = make_params(device, F16)
    first = Adam(params, master_weights=True)
    train(first, range(3))
    second = way(first)
    for each in (first, second):
        train(each, range(3, 6))
    for param, twin in zip(params, second.param_groups[0]["params"], strict=True):
        assert_same_bits(first.master(param), second.master(twin))
        for name, value in first.state[param].items():
            assert torch.equal(value, second.state[twin][name])


def test_others_load_its_file_and_it_loads_theirs(device: torch.device) -> None:
    params = make_params(device, F32)
    ours = Adam(params, moment_dtype=I8)
    train(ours, range(3))
    saved = ours.state_dict()
    kept = {value.dtype for state in saved["state"].values() for value in state.values()}
    assert kept == {F32}
    twins = copies_of(params)
    theirs = torch.optim.AdamW(twins, lr=0.01, weight_decay=0.1)
    theirs.load_state_dict(copy.deepcopy(saved))
    train(ours, range(3, 4))
    train(theirs, range(3, 4))
    for param, twin in zip(params, twins, strict=True):
        assert_near(param, twin)
    back = Adam(copies_of(twins))
    back.load_state_dict(theirs.state_dict())
    train(back, range(4, 5))
    assert back.state[back.param_groups[0]["params"][0]]["exp_avg"].dtype == I8


@pytest.mark.parametrize(("before", "after"), [(F32, I8), (I8, F32), (I8, BF16)])
def test_the_option_may_change(before: Any, after: Any, device: torch.device) -> None:
    params = make_params(device, F32)
    optimizer = FusedAdam(params, moment_dtype=before, stochastic_rounding=False)
    train(optimizer, range(2))
    wide = copy.deepcopy([codes.widened(optimizer.state[param], MOMENTS) for param in params])
    optimizer.param_groups[0].update(moment_dtype=after, betas=(0.99, 0.99))
    train(optimizer, range(2, 3))
    for param, state in zip(params, wide, strict=True):
        found = codes.widened(optimizer.state[param], MOMENTS)
        assert ("exp_avg_exponents" in optimizer.state[param]) == (
            after == I8 and param.numel() >= LEAST
        )
        assert param.grad is not None
        expected = 0.99 * state["exp_avg"].float() + 0.01 * param.grad
        blocks = in_blocks(expected).abs().amax(1).repeat_interleave(32)[: expected.numel()]
        error = in_memory(found["exp_avg"].float() - expected).cpu().abs()
        assert (error <= blocks * 2.0**-4).all()


def test_moments_follow_a_parameter_that_is_laid_anew(device: torch.device) -> None:
    (param,) = make_params(device, F32)[4:5]
    optimizer = Adam([param], stochastic_rounding=False)
    train(optimizer, range(2))
    before = codes.decoded("exp_avg", 0, optimizer.state[param])
    param.data = param.data.contiguous()
    optimizer.param_groups[0].update(lr=0.0, betas=(1.0 - 2.0**-50, 0.999))
    train(optimizer, range(2, 3))
    after = codes.decoded("exp_avg", 0, optimizer.state[param])
    assert after.is_contiguous()
    blocks = before.reshape(-1, 32).abs().amax(1)
    assert ((after - before).reshape(-1, 32).abs() <= blocks[:, None] * 2.0**-5).all()


def test_a_group_may_keep_floats(device: torch.device) -> None:
    rows, rest = (Parameter(torch.ones(LEAST, device=device)) for _ in range(2))
    floats = {"params": [rows], "moment_dtype": F32, "stochastic_rounding": False}
    optimizer = FusedAdamW([floats, {"params": [rest]}], moment_dtype=I8)
    for param in (rows, rest):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [optimizer.state[param]["exp_avg"].dtype for param in (rows, rest)] == [F32, I8]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda state: state.pop("exp_avg_exponents"),
            r"\[0\]\[0\] has codes of one byte, and the state has no 'exp_avg_exponents'",
        ),
        (
            lambda state: state.update(exp_avg_sq_exponents=state["exp_avg_sq_exponents"][1:]),
            r"exp_avg_sq_exponents.* has 127 exponents; it must have 128",
        ),
        (
            lambda state: state.update(exp_avg_exponents=state["exp_avg_exponents"].long()),
            r"exp_avg_exponents\[0\]\[0\] is of dtype Long; it must be Byte",
        ),
    ],
)
def test_a_state_whose_exponents_do_not_fit_is_refused(
    edit: Any, message: str, device: torch.device
) -> None:
    param = Parameter(torch.ones(LEAST, device=device))
    optimizer = Adam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    edit(optimizer.state[param])
    before = param.detach().clone()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        optimizer.step()
    assert_same_bits(param.detach(), before)


def test_rules_that_have_other_state_refuse_it(device: torch.device) -> None:
    param = Parameter(torch.ones(LEAST, device=device))
    optimizer = FusedLAMB([param])
    optimizer.param_groups[0]["moment_dtype"] = I8
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"moment_dtype is torch.int8; it must be torch"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"must be torch.float32, torch.bfloat16 or torch.int8"):
        FusedAdam([param], moment_dtype=F16)
