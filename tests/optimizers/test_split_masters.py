"""A float32 master as a 16-bit weight and a remainder, and steps that work on it."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from op_cases import BF16, F16, F32, NAMES
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C, amp
from apex_mp.optimizers import FusedAdam

I16 = torch.int16
INF, NAN = math.inf, math.nan
EXACT_FROM = 2.0**-16  # of float16
LARGEST_ERROR = 2.0**-41  # below
OVERFLOW = 65520.0

each_half = pytest.mark.parametrize("dtype", [F16, BF16], ids=NAMES.get)


# --- The format.


def there_and_back(masters: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split; return weights, and what they and their remainders are joined to."""
    weights = torch.empty_like(masters, dtype=dtype)
    remainders = torch.empty_like(masters, dtype=I16)
    joined = torch.empty_like(masters)
    _C.split_master(masters, weights, remainders)
    _C.join_master(weights, remainders, joined)
    return weights, joined


def assert_kept(masters: Tensor, dtype: torch.dtype) -> None:
    """Demand what the format promises of these float32 numbers."""
    weights, joined = there_and_back(masters, dtype)
    is_nan = masters.isnan()
    exact = joined.view(torch.int32) == masters.view(torch.int32)
    exact |= is_nan & joined.isnan() & weights.isnan()
    if dtype == F16:
        beyond = masters.abs() >= OVERFLOW
        exact |= beyond & (joined == masters * INF) & (weights == joined)
        error = (joined.double() - masters.double()).abs()
        exact |= (masters.abs() < EXACT_FROM) & (error <= LARGEST_ERROR)
    assert exact.all(), masters[~exact][:9]
    assert (is_nan | (joined.signbit() == masters.signbit())).all()
    # The weight is a nearest one, but for the error of the master.
    nearest = (masters.to(dtype).double() - masters.double()).abs()
    distance = (weights.double() - masters.double()).abs()
    slack = 2 * LARGEST_ERROR if dtype == F16 else 0.0
    is_nearest = (distance <= nearest + slack) | is_nan | masters.isinf() | weights.isinf()
    assert is_nearest.all(), masters[~is_nearest][:9]
    assert (weights.isinf() == masters.to(dtype).isinf()).all()


def assert_is_nearest(weight: Tensor, master: Tensor) -> None:
    """Demand that no 16-bit number is nearer to the master; of two, bfloat16 takes the larger."""
    nearest = (master.to(weight.dtype).float() - master).abs()
    assert_same_bits((weight.float() - master).abs(), nearest)


@each_half
@pytest.mark.usefixtures("cpu_level")
def test_each_exponent_and_each_edge_is_kept(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    low = torch.cat([torch.arange(-9, 10) + at for at in (0, 2**12, 2**13, 2**15, 2**16, 2**22)])
    high = torch.arange(2**9, dtype=torch.int64) << 23
    edges = (high[:, None] + low).flatten()
    random = (high[:, None] + torch.randint(0, 2**23, (2**9, 999))).flatten()
    # Halfway between two 16-bit numbers, where it is decided which is the weight.
    halves = torch.arange(2**16, dtype=torch.int32).to(I16).view(dtype).float()
    between = halves.view(torch.int32).long() + (2**15 if dtype == BF16 else 2**12)
    halfway = ((halves + halves.roll(-1)) / 2).view(torch.int32).long()
    near = [each + offset for each in (between, halfway) for offset in (-1, 0, 1)]
    bits = torch.cat([edges, random, *near]) & 0xFFFFFFFF
    assert_kept(bits.to(torch.int32).view(F32).to(device), dtype)


@pytest.mark.slow
@pytest.mark.cpu_only
@each_half
def test_each_float32_is_kept(dtype: torch.dtype, device: torch.device) -> None:
    """All 2**32, by the level that this processor has; all levels give the same bits."""
    count = 1 << 20  # Larger tensors would be new memory for each of 4,096 blocks.
    bits = torch.arange(count, dtype=torch.int32, device=device)
    masters, joined = bits.view(F32), torch.empty(count, device=device)
    weights, remainders = masters.to(dtype), torch.empty(count, dtype=I16, device=device)
    infinities = torch.empty_like(joined)
    exact, coarse = 0, 0
    for _ in range(1 << 12):
        _C.split_master(masters, weights, remainders)
        _C.join_master(weights, remainders, joined)
        size = int(bits[0]) & 0x7FFFFFFF
        if torch.equal(joined.view(torch.int32), bits):
            exact += 1
        elif dtype == F16 and size < 0x37800000:  # below 2**-16
            torch.sub(joined, masters, out=joined)
            assert joined.abs_().max() <= LARGEST_ERROR
            coarse += 1
        elif dtype == F16 and 0x47800000 <= size < 0x7F800000:  # beyond 2**16
            assert torch.equal(joined, torch.mul(masters, INF, out=infinities))
        else:
            assert_kept(masters, dtype)
        bits += count
    if dtype == BF16:
        assert exact == 2 * 0x7F8  # all that hold no NaN
    else:
        assert exact >= 2 * (0x477 - 0x378)
        assert coarse <= 2 * 0x378


# --- Steps. tests/optimizers/test_fused_rules.py trains every optimizer both ways.


def make_pair(dtype: torch.dtype, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """Return FusedAdam with float32 masters and with split ones, of equal parameters."""
    torch.manual_seed(0)
    values = [torch.randn(shape).mul_(0.02).to(dtype) for shape in ((40, 30), (), (3, 700), (0,))]
    return tuple(
        FusedAdam(
            [Parameter(value.to(device, copy=True)) for value in values],
            lr=0.01,
            weight_decay=0.1,
            master_weights=masters,
            **options,
        )
        for masters in ("float32", True)
    )


def params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_equal_grads(step: int, *optimizers: Any, scale: float = 1.0, bad: bool = False) -> None:
    for optimizer in optimizers:
        generator = torch.Generator().manual_seed(step)
        for param in params_of(optimizer):
            grad = torch.randn(param.shape, generator=generator) * scale
            param.grad = grad.to(param)
        if bad:
            params_of(optimizer)[0].grad[3] = INF


def assert_same_numbers(split: Any, wide: Any) -> None:
    for one, other in zip(params_of(split), params_of(wide), strict=True):
        assert_same_bits(split.master(one), wide.master(other))
        assert_is_nearest(one.detach(), split.master(one))
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_same_bits(split.state[one][name], wide.state[other][name])


@each_half
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler, amp.GradScaler])
def test_scaled_clipped_and_skipped_steps_are_those_of_float32_masters(
    dtype: torch.dtype, max_grad_norm: float, clip: bool, scaler: Any, device: torch.device
) -> None:
    pair = wide, split = make_pair(dtype, device, max_grad_norm=max_grad_norm)
    scalers = [scaler and scaler(device.type, init_scale=4.0) for _ in pair]
    for step in range(8):
        bad = step in (2, 5)
        give_equal_grads(step, *pair, scale=4.0, bad=bad and scaler is not None)
        before = [copy.deepcopy(params_of(split)), copy.deepcopy(dict(split.state))]
        for optimizer, scales in zip(pair, scalers, strict=True):
            params = [param for param in params_of(optimizer) if param.numel()]
            if scales is None:
                if clip:
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                continue
            scales.scale(torch.ones((), device=device))
            if clip and scaler is amp.GradScaler:
                scales.clip_grad_norm_(optimizer, 1.0)
            scales.step(optimizer)
            scales.update()
        if bad and scaler is not None:
            for param, value in zip(params_of(split), before[0], strict=True):
                assert_same_bits(param.detach(), value.detach())
            for old, new in zip(before[1].values(), split.state.values(), strict=True):
                assert all(torch.equal(old[name], new[name]) for name in new)
        assert all(kept.dtype == I16 for kept in split._own_masters.kept.values())
        if split.state:
            assert_same_numbers(split, wide)


# --- master()


def test_master_is_what_is_stepped_and_a_copy(device: torch.device) -> None:
    half = Parameter(torch.ones(3, dtype=F16, device=device))
    params = [half, Parameter(torch.ones(2, device=device)), Parameter(torch.ones(2).double())]
    for masters in (False, "float32", True):
        optimizer = FusedAdam(params[:2], master_weights=masters)
        for param in params[:2]:
            master = optimizer.master(param)
            assert_same_bits(master, param.detach().float())
            assert not master.requires_grad
            master.zero_()
            assert param.detach().sum() == param.numel()
    assert FusedAdam([params[2]]).master(params[2]).dtype == torch.float64
    with pytest.raises(ValueError, match=r"FusedAdam\.master: the tensor of shape \[3\] is no par"):
        FusedAdam(params[1:2]).master(half)


# --- Checkpoints.


def trained(dtype: torch.dtype, device: torch.device, steps: int = 4) -> tuple[Any, Any]:
    wide, split = make_pair(dtype, device)
    for step in range(steps):
        give_equal_grads(step, wide, split)
        wide.step()
        split.step()
    return wide, split


def copy_weights(source: Any, target: Any) -> None:
    for param, value in zip(params_of(target), params_of(source), strict=True):
        param.data.copy_(value.data)


SAVED: dict[str, Any] = {
    "float32 masters": lambda wide, split: wide.state_dict(),
    "split": lambda wide, split: split.state_dict(),
    "compact": lambda wide, split: split.state_dict(compact=True),
}


@each_half
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("masters", ["float32", True])
@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_of_either_kind_goes_on_as_either_kind(
    dtype: torch.dtype, saved: str, masters: Any, weights_first: bool, device: torch.device
) -> None:
    wide, split = trained(dtype, device)
    state = copy.deepcopy(SAVED[saved](wide, split))
    new = make_pair(dtype, device)[0 if masters == "float32" else 1]
    if weights_first:
        copy_weights(wide, new)
    new.load_state_dict(state)
    if not weights_first:
        copy_weights(wide, new)
    assert new.param_groups[0]["master_weights"] == masters
    give_equal_grads(9, wide, split, new)
    for optimizer in (wide, split, new):
        optimizer.step()
    for one, other in zip(params_of(new), params_of(wide), strict=True):
        assert new._own_masters.kept[one].dtype == (F32 if masters == "float32" else I16)
        assert_same_bits(new.master(one), wide.master(other))
        assert_is_nearest(one.detach(), new.master(one))


def test_what_is_saved_is_portable_unless_it_is_to_be_compact(device: torch.device) -> None:
    _, split = trained(BF16, device)
    live = split._own_masters.kept[params_of(split)[0]]
    portable = split.state_dict()["state"][0]["master_param"]
    compact = split.state_dict(compact=True)["state"][0]["master_param"]
    assert portable.dtype == F32
    assert_same_bits(compact, live)
    assert split._own_masters.kept[params_of(split)[0]] is live
    assert (
        pickle.loads(pickle.dumps(split)).state_dict(compact=True)["state"][0]["master_param"].dtype
        == I16
    )


@each_half
def test_torchs_adamw_and_we_load_each_others(dtype: torch.dtype, device: torch.device) -> None:
    _, split = trained(dtype, device)
    wide = [Parameter(split.master(param)) for param in params_of(split)]
    theirs = torch.optim.AdamW(wide, lr=0.01, weight_decay=0.1)
    theirs.load_state_dict(copy.deepcopy(split.state_dict()))
    ours = make_pair(dtype, device)[1]
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    copy_weights(split, ours)
    for param in wide:
        param.grad = torch.ones_like(param)
    for param in params_of(ours):
        param.grad = torch.ones_like(param)
    theirs.step()
    ours.step()
    for param, expected in zip(params_of(ours), wide, strict=True):
        torch.testing.assert_close(ours.master(param), expected.detach(), rtol=2e-6, atol=2e-8)


def test_the_layout_of_transformer_engine_is_loaded(device: torch.device) -> None:
    """It keeps int16 remainders of bfloat16 weights as master_param, the step count in groups."""
    wide, split = trained(BF16, device)
    saved = copy.deepcopy(split.state_dict(compact=True))
    for group in saved["param_groups"]:
        group["step"] = 4
    for state in saved["state"].values():
        del state["step"]
    new = make_pair(BF16, device)[1]
    copy_weights(split, new)
    new.load_state_dict(saved)
    give_equal_grads(5, wide, new)
    wide.step()
    new.step()
    assert_same_numbers(new, wide)
