"""The inside of apex's amp, which clients read, write and call: live in a training."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from amp_level_cases import LEVELS, Net, batches, everything, initialize, sgd, train, twins
from tolerances import assert_same_bits
from torch import Tensor, nn

from apex_mp import amp
from apex_mp._as_apex.inside import INSIDE
from apex_mp.amp._amp_state import _amp_state

levels = pytest.mark.parametrize("level", [*LEVELS])


@pytest.fixture(autouse=True)
def casts_end() -> Iterator[None]:
    yield
    initialize(nn.Linear(1, 1), opt_level="O0")


@contextlib.contextmanager
def scale_loss_in_pieces(loss: Tensor, optimizer: Any, *, delay: bool = False) -> Iterator[Tensor]:
    """As clients write amp.scale_loss anew, to change one line of it."""
    scaler, stash = _amp_state.loss_scalers[0], optimizer._amp_stash
    if not stash.params_have_scaled_gradients:
        optimizer._prepare_amp_backward()
    yield loss.float() * scaler.loss_scale()
    if delay:
        stash.params_have_scaled_gradients = True
        return
    scaler.clear_overflow_state()
    optimizer._post_amp_backward(scaler)
    stash.params_have_scaled_gradients = False
    if not scaler.update_scale() or stash.already_patched:
        return
    own = optimizer.step

    def skip(*_: Any, **__: Any) -> None:
        for param in getattr(stash, "all_fp32_from_fp16_params", ()):
            param.grad = None
        optimizer.step, stash.already_patched = own, False

    optimizer.step, stash.already_patched = skip, True


def start(level: str, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = Net() if model is None else model
    optimizer = sgd(model, lr=0.1, momentum=0.9)
    norms = {"keep_batchnorm_fp32": True} if level == "O3" else {}
    found: tuple[nn.Module, Any] = initialize(model, optimizer, opt_level=level, **norms)
    return found


def run(
    level: str, model: nn.Module, scale_loss: Callable[..., Any], *, delay: bool
) -> list[Tensor]:
    """Four steps of two losses each; the gradients of the second step overflow."""
    model, optimizer = start(level, model)
    data = batches(8)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            images, kinds = next(data)
            loss = nn.functional.cross_entropy(model(images), kinds)
            if step == 1:
                loss = loss * float("inf")
            delays = {} if scale_loss is amp.scale_loss else {"delay": delay and part == 0}
            if delay and scale_loss is amp.scale_loss:
                delays = {"delay_unscale": part == 0}
            with scale_loss(loss, optimizer, **delays) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    return everything(model, optimizer)


@pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_scale_loss_in_pieces_trains_as_in_one(level: str, delay: bool) -> None:
    one, other = twins(Net)
    expected = run(level, one, amp.scale_loss, delay=delay)
    found = run(level, other, scale_loss_in_pieces, delay=delay)
    # An overflow in each of two blocks halves the scale twice; the pieces count both, too.
    for tensor, wanted in zip(found, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_nvidias_resume_goes_on_to_the_bit() -> None:
    model, optimizer = start("O2")
    train(model, optimizer, 3)
    saved = copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": [*amp.master_params(optimizer)],
            "amp": amp.state_dict(),
        }
    )
    train(model, optimizer, 2, start=3)
    expected = everything(model, optimizer)
    model, optimizer = start("O2")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, master in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(master.data)
    amp.load_state_dict(saved["amp"])
    model.load_state_dict(saved["model"])
    train(model, optimizer, 2, start=3)
    for tensor, wanted in zip(everything(model, optimizer), expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_a_clients_own_overflow_buffer_skips_that_step_alone() -> None:
    """As NVIDIA's BERT: it averages gradients by hand, and steps only if none overflowed."""
    model, optimizer = start("O2")
    scaler = _amp_state.loss_scalers[0]
    scales, steps = [], 0
    for step, (images, kinds) in enumerate(batches(4)):
        loss = nn.functional.cross_entropy(model(images), kinds)
        factor = float("inf") if step == 1 else 1.0
        with amp.scale_loss(loss * factor, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        sums = [p.grad.sum() for p in amp.master_params(optimizer) if p.grad is not None]
        found_inf = step == 2 or not torch.stack(sums).isfinite().all()
        before = scaler._overflow_buf
        scaler._overflow_buf = torch.tensor([int(found_inf)], dtype=torch.int32)
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = before
        weights = [param.detach().clone() for param in model.parameters()]
        if had_overflow == 0:
            optimizer.step()
            steps += 1
        for param in optimizer._amp_stash.all_fp32_from_fp16_params:
            param.grad = None
        for param in model.parameters():
            param.grad = None
        changed = any((a != b).any() for a, b in zip(weights, model.parameters(), strict=True))
        assert changed == (step in (0, 3))
        scales.append(scaler.loss_scale())
    assert steps == 2
    assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**14]


def objects(optimizer: Any) -> dict[str, Any]:
    state = _amp_state
    return {
        "apex.amp._amp_state._amp_state": state,
        "apex.amp._amp_state._amp_state.opt_properties": state.opt_properties,
        "apex.amp._amp_state._amp_state.loss_scalers[0]": state.loss_scalers[0],
        "optimizer._amp_stash": optimizer._amp_stash,
        "optimizer": optimizer,
    }


@levels
def test_all_of_the_table_is_there_and_reading_and_writing_it_back_changes_nothing(
    level: str,
) -> None:
    one, other = twins(Net)
    model, optimizer = start(level, one)
    train(model, optimizer, 4)
    expected = everything(model, optimizer)
    model, optimizer = start(level, other)
    for start_at in range(4):
        for row in INSIDE:
            owner = objects(optimizer)[row.owner]
            for name in row.names.split():
                is_of_others = row.note.startswith("with") and level not in row.note
                if row.use == "absent" or is_of_others:
                    assert not hasattr(owner, name)
                    continue
                value = getattr(owner, name)
                assert callable(value) or row.use != "called"
                if row.use == "read, written":
                    setattr(owner, name, value)
        train(model, optimizer, 1, start=start_at)
    for tensor, wanted in zip(everything(model, optimizer), expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_what_is_written_counts() -> None:
    model, optimizer = start("O2")
    scaler, stash = _amp_state.loss_scalers[0], optimizer._amp_stash
    scaler._loss_scale, scaler._scale_seq_len, scaler._max_loss_scale = 2.0**10, 2, 2.0**11
    train(model, optimizer, 6)
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**11, 0)
    scaler._min_loss_scale = 2.0**11
    scaler._has_overflow = True
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0**11
    assert scaler._overflow_buf.tolist() == [0]
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale()
    scaler.clear_overflow_state()
    assert not scaler.update_scale()
    grads, out = [torch.tensor([2.0**11])], [torch.zeros(1)]
    scaler.unscale(grads, out, scaler.loss_scale())
    assert out[0].item() == 1.0
    scaler.unscale_with_stashed(grads, [torch.tensor([4.0])], out)
    assert out[0].item() == 5.0
    scaler.unscale([torch.tensor([float("inf")])], out)
    assert scaler._has_overflow
    assert scaler._overflow_buf.tolist() == [1]
    with torch.no_grad():
        for master in stash.all_fp32_from_fp16_params:
            master.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert all((param == 0.5).all() for param in stash.all_fp16_params)


@pytest.mark.parametrize("value", [None, "deleted", 3])
def test_a_stash_that_is_replaced_or_deleted_is_not_needed(value: Any) -> None:
    one, other = twins(Net)
    model, optimizer = start("O2", one)
    train(model, optimizer, 3)
    expected = everything(model, optimizer)
    model, optimizer = start("O2", other)
    if value == "deleted":
        del optimizer._amp_stash
    else:
        optimizer._amp_stash = value
    train(model, optimizer, 3)
    for tensor, wanted in zip(everything(model, optimizer), expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_a_stash_keeps_no_optimizer_alive_and_copies_have_a_stash_of_their_own() -> None:
    model, optimizer = start("O2")
    stash = optimizer._amp_stash
    _, copied = copy.deepcopy((model, optimizer))
    assert copied._amp_stash is not stash
    assert copied._amp_stash.all_fp32_from_fp16_params[0] is next(amp.master_params(copied))
    del optimizer
    gc.collect()
    with pytest.raises(ReferenceError, match="its optimizer is no more, or this one is a copy"):
        _ = stash.all_fp16_params


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_restored", [True, False])
def test_gradients_that_were_set_aside_are_checked_when_they_are_stepped(
    level: str, is_restored: bool
) -> None:
    """As gradient surgery does: each loss's gradients are copied, cleared, and added up at last."""
    model, optimizer = start(level)
    parts = []
    for number, (images, kinds) in enumerate(batches(2)):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), kinds)
        factor = float("inf") if number == 0 else 1.0
        with amp.scale_loss(loss * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        parts.append([None if p.grad is None else p.grad.clone() for p in master_params(optimizer)])
    if is_restored:
        for param, *grads in zip(master_params(optimizer), *parts, strict=True):
            param.grad = sum(grads)
    before = [param.detach().clone() for param in master_params(optimizer)]
    optimizer.step()
    changed = [(a != b).any() for a, b in zip(before, master_params(optimizer), strict=True)]
    assert any(changed) != is_restored
    assert all(param.isfinite().all() for param in master_params(optimizer))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_is_left_out_after_an_overflow_skips_no_other(set_to_none: bool) -> None:
    model, optimizer = start("O1")
    scaler, taken = _amp_state.loss_scalers[0], []
    for factor, (images, kinds) in zip((float("inf"), 1.0, 1.0), batches(3), strict=True):
        loss = nn.functional.cross_entropy(model(images), kinds)
        with amp.scale_loss(loss * factor, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        before = [param.detach().clone() for param in model.parameters()]
        if not scaler.update_scale():
            optimizer.step()
        taken.append(any((a != b).any() for a, b in zip(before, model.parameters(), strict=True)))
        optimizer.zero_grad(set_to_none=set_to_none)
    assert taken == [False, True, True]


def master_params(optimizer: Any) -> list[nn.Parameter]:
    return [*amp.master_params(optimizer)]
