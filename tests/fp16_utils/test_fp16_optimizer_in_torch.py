"""To torch an FP16_Optimizer is an Optimizer: schedulers, hooks, GradScaler, copying."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    F32,
    INF,
    STEPS_TO_COUNT_PASSES,
    assert_grads,
    assert_same,
    everything,
    faces,
    grads_used,
    ones,
    passes_over,
    probes,
    pull,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex_mp import fp16_utils
from apex_mp.optimizers import FusedAdam


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(warning.message) for warning in caught] == []


def run_step(optimizer: Any, value: float = 1.0) -> Any:
    optimizer.zero_grad()
    optimizer.backward(pull(*((param, value) for param in optimizer.all_fp16_params)))
    return optimizer.step()


@faces
@probes
def test_it_is_an_optimizer(probe: Any, face: Any, device: torch.device) -> None:
    inner = probe([ones(2, device=device)])
    optimizer = face(inner, verbose=False)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults is inner.defaults
    said = repr(optimizer)
    assert said.startswith("FP16_Optimizer with the static loss scale 1.0 around")
    assert "Parameter Group 0" in said


# Learning rates.

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


def build_with_scheduler(make: Any, on: str, probe: Any, face: Any, device: torch.device) -> Any:
    inner = probe([ones(2, device=device)], lr=0.5)
    if on == "inner, before":
        scheduler = make(inner)
        optimizer = face(inner, 128.0, verbose=False)
    else:
        optimizer = face(inner, 128.0, verbose=False)
        scheduler = make(optimizer if on == "wrapper" else inner)
    return optimizer, scheduler


places = pytest.mark.parametrize("on", ["wrapper", "inner, before", "inner, after"])


@faces
@probes
@places
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("first", [1.0, INF], ids=["step", "skipped step"])
def test_schedulers_set_the_learning_rate(
    first: float, name: str, on: str, probe: Any, face: Any, device: torch.device
) -> None:
    reference = torch.optim.SGD([ones(1, dtype=F32)], lr=0.5, momentum=0.9)
    if name == "OneCycleLR":
        reference = torch.optim.AdamW([ones(1, dtype=F32)], lr=0.5, betas=(0.0, 0.999))
    expected = SCHEDULERS[name](reference)
    with no_warning():
        optimizer, scheduler = build_with_scheduler(SCHEDULERS[name], on, probe, face, device)
        for value in (first, 1.0, 1.0, 1.0, 1.0):
            run_step(optimizer, value)
            assert optimizer.overflow == (value == INF)
            scheduler.step()
            reference.step()
            expected.step()
            assert scheduler.get_last_lr() == expected.get_last_lr()
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


@pytest.mark.cpu_only  # the names of passes
@pytest.mark.cpu_only  # the names of passes
def test_a_scheduler_on_the_inner_optimizer_leaves_the_fused_path_fused(
    device: torch.device,
) -> None:
    inner = FusedAdam([ones(1000, device=device)])
    scheduler = SCHEDULERS["StepLR"](inner)
    optimizer = fp16_utils.FP16_Optimizer(inner, 128.0, verbose=False)
    for _ in range(STEPS_TO_COUNT_PASSES):
        optimizer.backward(pull(*((param, 1.0) for param in optimizer.all_fp16_params)))
        with passes_over(1000) as names:
            optimizer.step()
        scheduler.step()
    assert names == ["apex_mp::check_pass", "apex_mp::adam_pass"]


# Hooks.

HOOKS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "on the wrapper": lambda optimizer, hook: [
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ],
    "on the inner": lambda optimizer, hook: [
        optimizer.optimizer.register_step_pre_hook(hook("pre")),
        optimizer.optimizer.register_step_post_hook(hook("post")),
    ],
    "on all": lambda optimizer, hook: [
        register_optimizer_step_pre_hook(hook("pre")),
        register_optimizer_step_post_hook(hook("post")),
    ],
}


@contextmanager
def recorded_hooks(where: str, optimizer: Any) -> Iterator[list[str]]:
    seen: list[str] = []

    def hook(name: str) -> Any:
        def call(given: Any, args: Any, kwargs: Any) -> None:
            assert given is (optimizer if where == "on the wrapper" else optimizer.optimizer)
            seen.append(name)

        return call

    handles = HOOKS[where](optimizer, hook)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@faces
@probes
@pytest.mark.parametrize("where", HOOKS)
def test_hooks_run_once_for_each_real_step(
    where: str, probe: Any, face: Any, device: torch.device
) -> None:
    optimizer = face(probe([ones(2, device=device)]), 128.0, verbose=False)
    with recorded_hooks(where, optimizer) as seen:
        for value, expected in ((1.0, ["pre", "post"]), (INF, []), (1.0, ["pre", "post"])):
            seen.clear()
            run_step(optimizer, value)
            assert seen == expected
    seen.clear()
    run_step(optimizer)
    assert seen == []


# torch.amp.GradScaler.


@faces
@probes
def test_grad_scaler_says_what_is_wrong(probe: Any, face: Any, device: torch.device) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), verbose=False)
    scaler = torch.amp.GradScaler(device=device.type)
    scaler.scale(pull((weight, 1.0))).backward()
    with pytest.raises(RuntimeError, match=r"FP16_Optimizer was given to a GradScaler"):
        scaler.step(optimizer)


# torch.compile.


@pytest.mark.slow
@probes
def test_in_a_compiled_training_step_only_the_model_is_traced(
    probe: Any, device: torch.device
) -> None:
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    def train(compiler: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2, device=device, dtype=F16)
        optimizer = fp16_utils.FP16_Optimizer(probe(model.parameters()), 128.0, verbose=False)
        x = torch.ones(3, 2, device=device, dtype=F16)

        def step() -> None:
            loss = model(x).float().square().sum()
            optimizer.zero_grad()
            optimizer.backward(loss, update_master_grads=False)
            optimizer.update_master_grads()
            optimizer.clip_master_grads(1.0)
            assert not optimizer.overflow
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            optimizer.step()

        compiled = compiler(step)
        for _ in range(3):
            compiled()
        return optimizer

    torch._dynamo.reset()
    with no_warning():
        optimizer = train(lambda step: torch.compile(step, backend=backend))
    calls = [node.op for graph in graphs for node in graph.graph.nodes if "call" in node.op]
    assert len(calls) == 4  # linear, float, square, sum
    expected = train(lambda step: step)
    if device.type == "cpu":
        assert_same(everything(optimizer), everything(expected))
    else:  # Two calls of one matrix product may add in another order there.
        torch.testing.assert_close(everything(optimizer), everything(expected))


@faces
@probes
@pytest.mark.parametrize("by", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_serialized_by_state_dict_alone(
    by: Any, probe: Any, face: Any, device: torch.device
) -> None:
    optimizer = face(probe([ones(2, device=device)]), verbose=False)
    with pytest.raises(RuntimeError) as raised:
        by(optimizer)
    assert str(raised.value) == "FP16_Optimizer should be serialized using state_dict()."
    with pytest.raises(RuntimeError) as raised:
        optimizer.__setstate__({})
    assert str(raised.value) == "FP16_Optimizer should be deserialized using load_state_dict()."


@probes
def test_masters_do_not_keep_a_dropped_optimizer_alive(probe: Any, device: torch.device) -> None:
    inner = probe([ones(2, device=device)])
    optimizer = fp16_utils.FP16_Optimizer(inner, verbose=False)
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    inner.param_groups[0]["params"][0].grad = torch.ones(2, device=device)
    inner.step()
    assert_grads(grads_used(inner), 1.0)


@faces
@probes
def test_hooks_of_the_wrapper_see_the_model_before_and_after(
    probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight], lr=0.5, weight_decay=0.0), 128.0, verbose=False)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight[0].item()))
    optimizer.register_step_post_hook(lambda *_: seen.append(weight[0].item()))
    run_step(optimizer)
    assert seen == [1.0, 0.5]
