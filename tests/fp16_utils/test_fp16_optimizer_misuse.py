"""FP16_Optimizer warns of uses that would train with wrong numbers, and not of correct ones.

Every warning is an error in these tests, so a program that ends has not been warned.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    F32,
    INF,
    NAN,
    assert_grads,
    faces,
    grads_used,
    master_grads,
    ones,
    parameter,
    probes,
    pull,
    wrap,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from apex_mp import convert, fp16_utils
from apex_mp.fp16_utils import LossScaler
from apex_mp.grads.edits import Edits, EditWatch

NOT_OUR_BACKWARD = r"optimizer\.backward\(loss\) instead of loss\.backward\(\)"


# loss.backward() instead of optimizer.backward(loss).


@faces
@probes
@pytest.mark.parametrize("scaling", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_a_plain_backward_gets_a_warning_at_the_first_step_and_once(
    scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), verbose=False, **scaling)
    pull((weight, 1.0)).backward()
    with pytest.warns(RuntimeWarning, match=NOT_OUR_BACKWARD) as warned:
        optimizer.step()
    assert warned[0].filename == __file__
    for _ in range(2):
        optimizer.zero_grad()
        pull((weight, 1.0)).backward()
        optimizer.step()


@pytest.mark.parametrize("call", ["update_master_grads", "clip", "closure", "resumed", "printed"])
@probes
def test_a_plain_backward_gets_a_warning_wherever_its_gradients_are_unscaled(
    call: str, probe: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = wrap(probe([weight]))

    def closure() -> Any:
        loss = pull((weight, 1.0))
        loss.backward()
        return loss

    if call == "resumed":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if call == "printed":
        repr(optimizer)
    if call != "closure":
        closure()
    unscale: Any = {
        "update_master_grads": optimizer.update_master_grads,
        "clip": lambda: optimizer.clip_master_grads(1.0),
        "closure": lambda: optimizer.step(closure),
    }.get(call, optimizer.step)
    with pytest.warns(RuntimeWarning, match=NOT_OUR_BACKWARD):
        unscale()


SCALED_BY_HAND: dict[str, Callable[[Any, Any], None]] = {
    "loss_scale": lambda optimizer, loss: (loss * optimizer.loss_scale).backward(),
    "cur_scale": lambda optimizer, loss: (loss.float() * optimizer.cur_scale).backward(),
    "loss_scaler": lambda optimizer, loss: optimizer.loss_scaler.backward(loss),
    "loss_scaler.loss_scale": lambda optimizer, loss: (
        loss * optimizer.loss_scaler.loss_scale
    ).backward(),
    "assigned": lambda optimizer, loss: _assign_and_scale(optimizer, loss),
    "scaler assigned": lambda optimizer, loss: _assign_scaler(optimizer, loss),
    "grad_tensors": lambda optimizer, loss: loss.backward(
        torch.full_like(loss, optimizer.loss_scale)
    ),
}


def _assign_and_scale(optimizer: Any, loss: Any) -> None:
    optimizer.loss_scale = 64.0
    (loss * 64.0).backward()


def _assign_scaler(optimizer: Any, loss: Any) -> None:
    scaler = LossScaler(64.0)
    optimizer.loss_scaler = scaler
    scaler.backward(loss)


@faces
@probes
@pytest.mark.parametrize("how", SCALED_BY_HAND)
def test_a_loss_that_the_script_scales_gets_no_warning(
    how: str, probe: Any, face: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}}
    optimizer = wrap(probe(params), face, **scaling)
    optimizer.zero_grad()
    SCALED_BY_HAND[how](optimizer, pull(*((param, 3.0) for param in params)))
    optimizer.step()
    assert_grads(grads_used(optimizer), 3.0, 3.0)


@probes
@pytest.mark.parametrize("zero_first", [True, False])
def test_one_backward_may_serve_two_optimizers(
    zero_first: bool, probe: Any, device: torch.device
) -> None:
    encoder, decoder = ones(2, device=device), ones(2, device=device)
    first, second = wrap(probe([encoder])), wrap(probe([decoder]))
    first.backward(pull((encoder, 3.0), (decoder, 3.0)))
    first.step()
    if zero_first:
        first.zero_grad()
    second.step()
    assert_grads(grads_used(second), 3.0)


# Gradients of the model edited between backward and step.


def _all_reduce(grad: Any) -> None:
    grad.data.mul_(2.0)  # As dist.all_reduce does it, unseen by the gradient version.


EDITS: dict[str, Callable[[Any], None]] = {
    "mask": lambda grad: grad.mul_(grad.new_tensor([0.0, 1.0])),
    "mask data": lambda grad: grad.data.mul_(grad.new_tensor([0.0, 1.0])),
    "all-reduce": _all_reduce,
    "sign": lambda grad: grad.neg_(),
}
EDITED = {"mask": [0.0, 3.0], "mask data": [0.0, 3.0], "all-reduce": 6.0, "sign": -3.0}


@faces
@probes
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_the_models_gradients_count(
    edit: str, looks: bool, probe: Any, face: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params), face)
    optimizer.backward(pull(*((param, 3.0) for param in params)))
    if looks:
        assert_grads(master_grads(optimizer), 3.0, 3.0)
    for param in params:
        EDITS[edit](param.grad)
    optimizer.step()
    assert_grads(grads_used(optimizer), *[torch.tensor(EDITED[edit]).expand(2)] * 2)


@faces
@probes
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_overflow_of_another_process_skips_the_step(
    value: float, probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = wrap(probe([weight]), face)
    optimizer.backward(pull((weight, 3.0)))
    weight.grad.data.fill_(value)  # as an all-reduce leaves it
    optimizer.step()
    assert optimizer.overflow
    assert weight.tolist() == [1.0, 1.0]


@probes
def test_edits_of_masters_and_model_get_one_warning_and_those_of_masters_win(
    probe: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = wrap(probe([weight]))

    def edit_both() -> None:
        optimizer.zero_grad()
        optimizer.backward(pull((weight, 3.0)))
        optimizer.param_groups[0]["params"][0].grad.mul_(4.0)
        weight.grad.data.mul_(2.0)

    edit_both()
    with pytest.warns(RuntimeWarning, match=r"uses the masters'\. Call optimizer\.update_master"):
        optimizer.step()
    assert_grads(grads_used(optimizer), 12.0)
    edit_both()
    optimizer.step()


def test_norms_that_a_capture_has_not_measured_are_no_edit(device: torch.device) -> None:
    model, master = (ones(2, device=device) for _ in range(2))
    watch = EditWatch()
    watch.begin([model], None, [master])
    assert watch.find([model], {id(model): 1.0}, [master]) is Edits.NONE
    for before in ({}, {id(model): 1.0}):  # The model had no gradient, or another one.
        watch.begin([model], before)
        assert watch.find([model], {id(model): 2.0}, [master]) is Edits.OF_MODEL


@probes
@pytest.mark.parametrize("value", [INF, NAN])
def test_scaling_masters_gradients_of_a_step_that_overflows_is_no_edit_of_the_models(
    value: float, probe: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = wrap(probe([weight]))
    optimizer.backward(pull((weight, [value, 1.0])))
    optimizer.param_groups[0]["params"][0].grad.mul_(0.5)
    optimizer.step()
    assert optimizer.overflow


# clip_grad_norm_(model.parameters()).


@faces
@probes
@pytest.mark.parametrize("max_norm", [0.001, 0.1, 0.25, 0.7, 1.0, 5.0, 25.0])
def test_a_clip_of_scaled_gradients_gets_a_warning_at_the_first_step_taken_and_once(
    max_norm: float, probe: Any, face: Any, device: torch.device
) -> None:
    params = [ones(3, dtype=dtype, device=device) for dtype in (F16, F32, F16)]
    optimizer = wrap(probe(params), face, static_loss_scale=1024.0)
    optimizer.step()  # Without gradients it decides nothing.

    def clip(value: float) -> None:
        optimizer.zero_grad()
        optimizer.backward(pull(*((param, [value, 2.0, 0.3]) for param in params)))
        clip_grad_norm_(params, max_norm)

    clip(INF)
    optimizer.step()
    assert optimizer.overflow
    clip(1.0)
    with pytest.warns(
        RuntimeWarning, match=r"clip_master_grads\(max_norm\), or give max_grad_norm="
    ):
        optimizer.step()
    clip(1.0)
    optimizer.step()


@probes
def test_a_clip_that_leaves_zeros_because_the_norm_overflows_is_warned_of(
    probe: Any, device: torch.device
) -> None:
    weight = ones(4, device=device)
    optimizer = wrap(probe([weight]), dynamic_loss_scale=True)
    optimizer.loss_scaler.cur_scale = 2.0**15
    for step in range(5):
        if step:
            optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(pull((weight, 1.9)))
        clip_grad_norm_([weight], 1.0)  # 1.9 * 2**15 fits float16; the norm, twice that, does not.
        assert not weight.grad.any()
    with pytest.warns(RuntimeWarning, match=r"clip_master_grads\(max_norm\)"):
        optimizer.step()


# Inner optimizers that step other parameters than those in their param_groups.


class Delegating(torch.optim.Optimizer):
    """Steps by an optimizer of its own, as ZeroRedundancyOptimizer does."""

    def __init__(self, params: Any, in_a_list: bool, shares_lists: bool) -> None:
        super().__init__(params, {"lr": 0.5})
        local = torch.optim.SGD([{**group} for group in self.param_groups], lr=0.5)
        if shares_lists:
            for own, group in zip(local.param_groups, self.param_groups, strict=True):
                own["params"] = group["params"]
        self.local: Any = [local] if in_a_list else local

    def step(self, closure: Any = None) -> None:
        for local in self.local if isinstance(self.local, list) else [self.local]:
            local.step()


@faces
@pytest.mark.parametrize("in_a_list", [False, True])
def test_an_inner_optimizer_with_lists_of_its_own_is_refused(
    in_a_list: bool, face: Any, device: torch.device
) -> None:
    low, own = ones(2, device=device), ones(2, dtype=F32, device=device)
    inner = Delegating([low, own], in_a_list, shares_lists=False)
    with pytest.raises(TypeError, match=r"Delegating steps its parameters by its local, .* SGD"):
        face(inner, verbose=False)
    assert inner.param_groups[0]["params"] == [low, own]
    assert face(Delegating([own], in_a_list, shares_lists=False), verbose=False)  # no masters


class WithCopies(torch.optim.SGD):
    """Keeps a list of its own, of which nothing can be seen from outside."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        kept = [param for group in self.param_groups for param in group["params"]]
        self.kept = lambda: kept

    def step(self, closure: Any = None) -> None:
        for param in self.kept():
            param.data.sub_(param.grad.data, alpha=self.param_groups[0]["lr"])


def test_an_inner_optimizer_that_steps_the_model_itself_is_refused_at_its_first_real_step(
    device: torch.device,
) -> None:
    weight = ones(2, device=device)
    optimizer = fp16_utils.FP16_Optimizer(WithCopies([weight], lr=0.0), 128.0, verbose=False)
    optimizer.backward(pull((weight, 1.0)))
    optimizer.step()  # A warm-up may begin at 0, and says nothing.
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"WithCopies\.step\(\) has written the model's param"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.cpu_only  # gloo
def test_a_zero_redundancy_optimizer_is_refused(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        zero = ZeroRedundancyOptimizer([ones(2)], torch.optim.Adam)
        with pytest.raises(TypeError, match="ZeroRedundancyOptimizer steps its parameters by its "):
            fp16_utils.FP16_Optimizer(zero, verbose=False)
    finally:
        torch.distributed.destroy_process_group()


# Weights of the model that others write.


def load(weight: Parameter) -> None:
    torch.nn.ParameterList([weight]).load_state_dict({"0": torch.full((2,), 5.0)})


WRITES: dict[str, Callable[[Parameter], Any]] = {
    "load_state_dict": load,
    "clamp data": lambda weight: weight.data.clamp_(-0.25, 0.25),
    "sign": lambda weight: torch.nn.init.constant_(weight, -float(weight.detach()[0])),
}


@faces
@probes
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.cpu_only  # what `.data` writes is not looked for on a GPU
def test_weights_that_the_next_step_overwrites_get_one_warning(
    write: str, steps: int, probe: Any, face: Any, device: torch.device
) -> None:
    weight, other = ones(2, device=device), ones(2, device=device)
    model = torch.nn.ParameterDict({"weight": weight, "other": other})
    optimizer = wrap(probe([other, weight], lr=0.25), face, model=model)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            optimizer.backward(pull((weight, 1.0)))
            optimizer.step()

    train(steps)
    WRITES[write](weight)
    with pytest.warns(RuntimeWarning, match=r"model's weight changed .*convert\.load\(model"):
        train(1)
    WRITES[write](weight)
    train(1)


@probes
def test_a_checkpoint_that_a_running_model_loads_gets_a_warning(
    probe: Any, device: torch.device
) -> None:
    weights = [ones(2, device=device) for _ in range(300)]
    optimizer = wrap(probe(weights))
    for _ in range(5):  # No norms are compared after 5 steps.
        optimizer.zero_grad()
        optimizer.backward(pull(*((weight, 1.0) for weight in weights)))
        optimizer.step()
    for weight in weights:
        load(weight)
    with pytest.warns(RuntimeWarning, match="group 0, parameter 0 and .* more parameters changed"):
        optimizer.step()


def swap_in_and_out(weight: Any, optimizer: Any) -> None:
    kept = weight.detach().clone()
    for values in (torch.zeros_like(kept), kept):
        with torch.no_grad():
            weight.copy_(values)


def write_both(weight: Any, optimizer: Any) -> None:
    load(weight)
    optimizer.fp32_groups_flat[0].fill_(5.0)


AGREEING: dict[str, Callable[[Any, Any], Any]] = {
    "swapped out and in": swap_in_and_out,
    "masters too": write_both,
    "masters alone": lambda weight, optimizer: optimizer.fp32_groups_flat[0].fill_(5.0),
    "checkpoint": lambda weight, optimizer: (
        load(weight),
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    ),
    "converted": lambda weight, optimizer: convert.load(
        torch.nn.ParameterList([weight]), {"0": torch.full((2,), 5.0)}, optimizer
    ),
}


@probes
@pytest.mark.parametrize("how", AGREEING)
def test_weights_that_agree_with_their_masters_get_no_warning(
    how: str, probe: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = wrap(probe([weight]))
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(pull((weight, 1.0)))
        optimizer.step()
        assert torch.equal(weight, optimizer.fp32_groups_flat[0].half())
        AGREEING[how](weight, optimizer)


@probes
def test_two_optimizers_on_the_same_parameters_get_a_warning(
    probe: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    first, second = wrap(probe([weight])), wrap(probe([weight]))
    first.backward(pull((weight, 1.0)))
    first.step()
    first.zero_grad()
    second.backward(pull((weight, 1.0)))
    with pytest.warns(RuntimeWarning, match="another FP16_Optimizer has masters of the same"):
        second.step()


def beyond(probe: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    weight = parameter([65000.0, 1.0], dtype, device)
    model = torch.nn.ParameterDict({"weight": weight})
    return weight, wrap(probe([weight], lr=1000.0), model=model)


@probes
@pytest.mark.cpu_only  # On a GPU the warning comes with the first skipped step.
def test_a_master_beyond_float16_gets_a_warning_with_its_name(
    probe: Any, device: torch.device
) -> None:
    weight, optimizer = beyond(probe, F16, device)
    optimizer.backward(pull((weight, -1.0)))
    with pytest.warns(RuntimeWarning, match="weight has come to .* beyond 65504"):
        optimizer.step()
    assert weight.isinf().tolist() == [True, False]
    assert not optimizer.overflow
    optimizer.step()


@faces
def test_a_wrong_parameter_of_the_last_group_leaves_the_first_as_it_was(face: Any) -> None:
    good, bad = Parameter(torch.ones(2).half()), Parameter(torch.ones(2, device="meta").half())
    inner = torch.optim.SGD([{"params": [good]}, {"params": [bad]}], lr=0.1)
    with pytest.raises(TypeError, match=r"FP16_Optimizer: params\[1\]\[0\] is on meta"):
        face(inner, verbose=False)
    assert inner.param_groups[0]["params"] == [good]
