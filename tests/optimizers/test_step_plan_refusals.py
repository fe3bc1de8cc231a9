"""What the step plan refuses, that nothing has changed then, and that it keeps nothing alive."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, Unchanged, copies_of
from plain_tensor_cases import Wrapper, fake
from plan_cases import Run, fresh_grad, make_run, parameter
from scaled_steps import take_step
from torch import Tensor
from torch.nn import Parameter

from apex_mp import _C
from apex_mp.optimizers import FusedAdam


def give(run: Run) -> None:
    for index, param in enumerate(run.params):
        param.grad = fresh_grad(param, 5, index)


FOREIGN: dict[str, Callable[[Tensor], Tensor]] = {
    "a FakeTensor": fake,
    "a wrapper subclass": Wrapper,
    "a lazy negation": lambda tensor: torch._neg_view(tensor.detach()),
}


each_foreign = pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)


each_warmth = pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "warm"])


@each_warmth
@pytest.mark.parametrize(
    ("place", "make"),
    [
        pytest.param(place, make, id=f"{name} in {place}")
        for place in ("params", "grads", "output_params")
        for name, make in FOREIGN.items()
        if (place, name) != ("grads", "a lazy negation")  # which is resolved
    ],
)
def test_a_tensor_whose_numbers_do_not_lie_in_its_memory_is_refused_by_name(
    place: str, make: Callable[[Tensor], Tensor], steps_before: int
) -> None:
    optimizer = FusedAdam([parameter(4, 3) for _ in range(20)], lr=0.1)
    params = optimizer.param_groups[0]["params"]
    Run(optimizer).train(steps_before)
    good = params[17]
    grads = [torch.ones(4, 3) for _ in params]
    outputs = [Parameter(torch.zeros(4, 3)) for _ in params]
    lists = {"params": params, "grads": grads, "output_params": outputs}
    with Unchanged(optimizer, outputs):
        given = lists[place][17]
        lists[place][17] = make(given)  # type: ignore[index]
        with pytest.raises(
            (TypeError, RuntimeError), match=rf"FusedAdam: {place}\[0\]\[17\] has the dispatch key"
        ):
            optimizer.step(grads=[grads], output_params=[outputs])
        params[17] = good
        outputs[17] = outputs[17] if place != "output_params" else given
    assert len(optimizer.state) == (20 if steps_before else 0)


@each_foreign
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_state_whose_numbers_do_not_lie_in_its_memory_is_refused_by_name(
    key: str, make: Callable[[Tensor], Tensor]
) -> None:
    run = make_run("bf16 with masters")
    run.train(2)
    state = run.optimizer.state[run.params[3]]
    good = state[key]
    with Unchanged(run.optimizer):
        state[key] = make(good)
        give(run)
        with pytest.raises(
            (TypeError, RuntimeError), match=rf"FusedAdam: {key}\[0\]\[3\] has the dispatch key"
        ):
            run.optimizer.step()
        state[key] = good


WRONG_STATE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "fp16 moment": ("exp_avg", lambda t: t.half()),
    "fp64 moment": ("exp_avg_sq", lambda t: t.double()),
    "larger moment": ("exp_avg", lambda t: t.new_zeros(9)),
    "smaller moment": ("exp_avg_sq", lambda t: t.flatten()[:-1]),
    "moment with gaps": ("exp_avg", lambda t: torch.stack([t, t], -1)[..., 0].expand(5, 4, 3)),
    "fp64 step": ("step", lambda t: t.double()),
    "int step": ("step", lambda t: t.int()),
    "two steps": ("step", lambda t: t.expand(2).clone()),
    "moment on meta": ("exp_avg", lambda t: t.to("meta")),
}


@pytest.mark.parametrize(("key", "spoil"), WRONG_STATE.values(), ids=WRONG_STATE)
def test_state_that_does_not_fit_is_refused_by_name_and_a_new_state_is_not_made(
    key: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    run = make_run("bf16 with masters")
    run.train(2)
    run.listed.insert(0, parameter(3))  # would get a state
    state = run.optimizer.state[run.params[2]]
    good = state[key]
    with Unchanged(run.optimizer):
        state[key] = spoil(good)
        give(run)
        with pytest.raises((TypeError, RuntimeError), match=rf"FusedAdam: {key}\[0\]\[2\] "):
            run.optimizer.step()
        state[key] = good


def test_state_that_does_not_fit_is_refused_before_a_master_is_made_beside_it() -> None:
    run = Run(FusedAdam([parameter(5, dtype=F16), parameter(6, dtype=F16)]))
    run.train(2)
    state = run.optimizer.state[run.params[1]]
    good = state["exp_avg"]
    run.group["master_weights"] = True
    with Unchanged(run.optimizer):
        state["exp_avg"] = good.half()
        give(run)
        with pytest.raises((TypeError, RuntimeError), match=r"exp_avg\[0\]\[1\] is of dtype Half"):
            run.optimizer.step()
        state["exp_avg"] = good


@each_warmth
@pytest.mark.parametrize("meta", [[1], [0, 1]], ids=["one parameter", "all"])
def test_a_parameter_on_meta_is_refused_by_a_sentence(meta: list[int], steps_before: int) -> None:
    run = Run(FusedAdam([parameter(3), parameter(4)], lr=0.1))
    run.train(steps_before)
    kept = run.listed[:]
    with Unchanged(run.optimizer):
        for index in meta:
            run.listed[index] = Parameter(kept[index].detach().to("meta"))
            run.listed[index].grad = torch.empty_like(run.listed[index])
        kept[0].grad = torch.ones(3)
        with pytest.raises((RuntimeError, TypeError, ValueError), match=r"(?i)meta"):
            run.optimizer.step()
        run.listed[:] = kept


def test_a_parameter_that_is_no_tensor_is_refused() -> None:
    run = make_run("two groups, mixed")
    run.train(1)
    give(run)
    with Unchanged(run.optimizer):
        run.optimizer.param_groups[1]["params"].append(1.0)
        with pytest.raises(TypeError, match="FusedAdam: a parameter is a float; it must be a tens"):
            run.optimizer.step()
        run.optimizer.param_groups[1]["params"].pop()


def test_a_parameter_that_is_listed_twice_is_stepped_as_by_torch_or_refused() -> None:
    param = parameter(5)
    (twin,) = copies_of([param])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FusedAdam([param, param], lr=0.1, weight_decay=0.0)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        expected = torch.optim.AdamW([twin, twin], lr=0.1, weight_decay=0.0, foreach=False)
    for step in range(3):
        param.grad = twin.grad = fresh_grad(param, step, 0)
        expected.step()
        try:
            optimizer.step()
        except (RuntimeError, ValueError) as error:
            refusal = str(error)
            break
    else:
        torch.testing.assert_close(param, twin)
        return
    assert "INTERNAL ASSERT" not in refusal
    assert not optimizer.state


# --- Nothing is kept alive


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_a_warm_plan_keeps_no_parameter_gradient_or_state_alive() -> None:
    run = make_run("two groups, mixed")
    run.make_grad = lambda p, step, i: torch.stack([fresh_grad(p, step, i)] * 2, -1)[..., 0]
    run.train(3)
    kept = [weakref.ref(param) for param in run.params]
    kept += [weakref.ref(param.grad) for param in run.params]
    kept += [weakref.ref(t) for state in run.optimizer.state.values() for t in state.values()]
    assert alive(kept) == len(kept)
    run.optimizer.zero_grad()
    run.optimizer.state.clear()
    for group in run.optimizer.param_groups:
        group["params"].clear()
    run.optimizer.step()  # Masters are freed in the next step.
    assert alive(kept) == 0


@pytest.mark.parametrize("lists", [[[None]], [[None, None], [None]], [None], [[None] * 3]])
def test_a_step_whose_lists_do_not_fit_the_groups_is_refused(
    lists: Any, device: torch.device
) -> None:
    params = [Parameter(torch.ones(2, device=device)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}])
    if lists == [[None, None], [None]]:  # the one that fits
        take_step(optimizer, grads_of=lists)
        assert [state["step"].item() for state in optimizer.state.values()] == [1.0] * 3
        return
    with pytest.raises(ValueError, match="is not a list with one item for each of its"):
        take_step(optimizer, grads_of=lists)
    assert not optimizer.state


@pytest.mark.slow
@pytest.mark.cpu_only  # A step on a GPU is over on the host within a millisecond.
def test_other_threads_run_while_a_long_step_is_taken(device: torch.device) -> None:
    param = Parameter(torch.ones(1 << 24, device=device))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param])
    optimizer.step()
    beats = 0
    stepping = True

    def beat() -> None:
        nonlocal beats
        while stepping:
            beats += 1
            time.sleep(1e-4)  # lets go of the lock itself

    thread = threading.Thread(target=beat)
    switch = sys.getswitchinterval()
    # Who waits for the lock asks for it after so long: never, unless the step lets go of it.
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        before = beats
        for _ in range(3):
            optimizer.step()
        after = beats
    finally:
        stepping = False
        sys.setswitchinterval(switch)
        thread.join()
    # Torch lets go of the lock for a moment here and there; that is not meant.
    assert after - before > 30


@pytest.mark.cpu_only
@pytest.mark.skipif(_C.with_cuda, reason="this build has CUDA")
def test_a_build_without_cuda_has_no_outcome_on_a_device() -> None:
    plan = FusedAdam([parameter(5)])._present_engine().new_plan()
    with pytest.raises(RuntimeError, match="this build has no CUDA"):
        _ = plan.outcome
    with pytest.raises(RuntimeError, match="this build has no CUDA"):
        plan.read_outcome(torch.zeros(1))
