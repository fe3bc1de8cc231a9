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

from apex_mp import fp16_utils
from apex_mp.optimizers import FusedAdam


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(warning.message) for warning in caught] == []


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


@pytest.mark.cpu_only  # the names of passes
def test_a_scheduler_on_the_inner_optimizer_leaves_the_fused_path_fused(
    device: torch.device,
) -> None:
    inner = FusedAdam([ones(1000, device=device)])
    scheduler = lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = fp16_utils.FP16_Optimizer(inner, 128.0, verbose=False)
    for _ in range(STEPS_TO_COUNT_PASSES):
        optimizer.backward(pull(*((param, 1.0) for param in optimizer.all_fp16_params)))
        with passes_over(1000) as names:
            optimizer.step()
        scheduler.step()
    assert names == ["apex_mp::check_pass", "apex_mp::adam_pass"]


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
