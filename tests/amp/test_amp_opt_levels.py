"""amp.initialize: what models, optimizers and losses do at the levels O0 to O3."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from amp_level_cases import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    OPTIMIZERS,
    Net,
    backward,
    batches,
    dtypes,
    initialize,
    levels,
    optimizers,
    step,
    train,
    train_plain,
    twins,
)
from fp16_cases import pull
from torch import Tensor, nn

from apex_mp import amp, fp16_utils
from apex_mp.amp import _amp_state
from apex_mp.optimizers import FusedAdam

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def linear(*values: float) -> nn.Linear:
    """A layer of one output whose weights are given."""
    layer = nn.Linear(len(values), 1, bias=False)
    layer.weight.data = torch.tensor([values])
    return layer


def sgd(*models: nn.Module, lr: float = 1.0, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr, **options)


# Training.

# Every operation of a step rounds by 2**-11 or 2**-8 of the value; fifteen steps from a loss of 1.1
# have accumulated the figures in the comments.
LOSS_TOLERANCES = {
    "O0": {F16: 0.0, BF16: 0.0},
    "O1": {F16: 1e-3, BF16: 8e-3},  # 1e-4 and 1.5e-3
    "O2": {F16: 1e-3, BF16: 8e-3},  # 2e-4 and 1.8e-3
    "O3": {F16: 1e-3, BF16: 3e-2},  # 1e-4 and 7e-3: the weights are rounded after each step
}


@dtypes
@levels
@optimizers
def test_losses_follow_the_float32_training(make: Any, level: str, dtype: torch.dtype) -> None:
    model, reference = twins(Net)
    expected = train_plain(reference, make(reference.parameters()), 15)
    optimizer = make(model.parameters())
    initialize(model, optimizer, opt_level=level, dtype=dtype)
    losses = train(model, optimizer, 15)
    assert losses[0] > 1.0
    if level == "O3" and dtype is F16 and make in (OPTIMIZERS["Adam"], OPTIMIZERS["AdamW"]):
        # torch's own keep squares of gradients in float16, where small ones are zero.
        assert losses[-1] < 0.5
        return
    assert expected[-1] < 0.5
    tolerance = LOSS_TOLERANCES[level][dtype]
    torch.testing.assert_close(losses, expected, rtol=0.0, atol=tolerance)


DTYPES = {
    # level, keep_batchnorm_fp32: parameters, those of batch norms, running mean, in the model
    ("O0", None): (F32, F32, F32, F32),
    ("O1", None): (F32, F32, F32, F16),
    ("O2", None): (F16, F32, F32, F16),
    ("O2", True): (F16, F32, F32, F16),
    ("O2", "True"): (F16, F32, F32, F16),
    ("O2", False): (F16, F16, F16, F16),
    ("O2", "False"): (F16, F16, F16, F16),
    ("O3", None): (F16, F16, F16, F16),
    ("O3", "True"): (F16, F32, F32, F16),
}


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("case", "row"), DTYPES.items(), ids=map(str, DTYPES))
def test_parameters_and_buffers_have_the_dtypes_of_the_level(
    case: tuple[str, Any], row: tuple[torch.dtype, ...], dtype: torch.dtype
) -> None:
    level, keep_batchnorm_fp32 = case
    model = Net()
    initialize(model, opt_level=level, keep_batchnorm_fp32=keep_batchnorm_fp32, dtype=dtype)
    seen = []
    model.conv.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    images, _ = next(batches(1))
    outputs = model(images)
    dtypes = [
        model.conv.weight.dtype,
        model.batch_norm.weight.dtype,
        model.batch_norm.running_mean.dtype,
        seen[0],
    ]
    assert dtypes == [F32 if wanted is F32 else dtype for wanted in row]
    assert model.layer_norm.weight.dtype is dtypes[0]
    assert model.batch_norm.num_batches_tracked.dtype is torch.int64
    assert outputs.dtype is (dtype if level == "O1" else F32)


Pair = namedtuple("Pair", ["first", "second"])


class Nested(nn.Module):
    """Returns what it is called with, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return {"args": args, "kwargs": kwargs}


def dtypes_in(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, (list, tuple)):
        return [dtypes_in(item) for item in value]
    if isinstance(value, dict):
        return {key: dtypes_in(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize(
    ("level", "cast_model_outputs", "inside", "outside"),
    [
        ("O0", None, F32, F32),
        ("O1", None, None, None),
        ("O1", F16, None, F16),
        ("O2", None, F16, F32),
        ("O2", F16, F16, F16),
        ("O3", None, F16, F32),
        ("O3", BF16, F16, BF16),
    ],
)
def test_floating_tensors_in_arguments_and_results_are_cast_however_deep_they_lie(
    level: str,
    cast_model_outputs: torch.dtype | None,
    inside: torch.dtype | None,
    outside: torch.dtype | None,
) -> None:
    model = Nested()
    initialize(model, opt_level=level, cast_model_outputs=cast_model_outputs)
    double, half, ints = torch.ones(2, dtype=F64), torch.ones(2, dtype=F16), torch.arange(2)
    args = (double, [half, ints], Pair(double, "text"))
    kwargs = {"mask": ints > 0, "more": {"deep": (half, None)}}
    result = model(*args, **kwargs)

    def wanted(dtype: torch.dtype | None) -> Any:
        first, second = dtype or F64, dtype or F16
        return (
            [first, [second, torch.int64], [first, "text"]],
            {"mask": torch.bool, "more": {"deep": [second, None]}},
        )

    assert (dtypes_in(model.seen[0]), dtypes_in(model.seen[1])) == wanted(inside)
    assert (dtypes_in(result["args"]), dtypes_in(result["kwargs"])) == wanted(outside)
    assert isinstance(model.seen[0][2], Pair)
    assert double.dtype is F64


class Answer(OrderedDict[str, Tensor]):
    """A result as some libraries return it."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError


class Batch:
    """Has a `to` of its own."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.images.to(dtype))


class OwnClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(1.0)

    def forward(self, batch: Batch) -> Answer:
        return Answer(logits=self.linear(batch.images))


def test_batches_and_results_of_other_classes_are_cast_too() -> None:
    model = OwnClasses()
    initialize(model, opt_level="O2")
    answer = model(Batch(torch.ones(1, 1)))
    assert type(answer) is Answer
    assert answer["logits"].dtype is F32


def test_hooks_of_the_user_see_a_model_that_is_what_it_was() -> None:
    model = linear(1.0)
    seen: dict[str, torch.dtype] = {}
    model.register_forward_pre_hook(lambda _, args: seen.update(before=args[0].dtype))
    model.register_forward_hook(lambda *args: seen.update(after=args[2].dtype))
    initialize(model, opt_level="O2")
    model.register_forward_hook(lambda *args: seen.update(later=args[2].dtype))
    model(torch.ones(1, 1))
    assert seen == {"before": F32, "after": F32, "later": F32}


# Masters.


def test_masters_are_the_float32_values_from_before_the_cast() -> None:
    model = linear(1 / 3, 1e-9)
    before = model.weight.detach().clone()
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master, before)
    assert master.requires_grad
    assert torch.equal(model.weight, before.half())


def test_masters_gather_updates_that_the_model_would_lose() -> None:
    model = linear(1.0)
    optimizer = sgd(model, lr=2.0**-13)  # a fourth of the distance to the next float16
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    weights = []
    for _ in range(4):
        optimizer.zero_grad()
        step(optimizer, pull((model.weight, [[-8.0]])))
        weights.append(model.weight.item())
    assert weights == [1.0009765625, 1.001953125, 1.0029296875, 1.00390625]
    (master,) = amp.master_params(optimizer)
    assert master.item() == 1.0 + 4 * 2.0**-10


def test_what_is_clipped_is_what_is_stepped_with() -> None:
    model = linear(0.0, 0.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    backward(optimizer, pull((model.weight, [[3.0, 4.0]])))
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert norm.item() == 5.0
    torch.testing.assert_close(
        model.weight.float(), torch.tensor([[-0.6, -0.8]]), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_clipping_what_overflowed_is_harmless(level: str) -> None:
    model = linear(1.0, 2.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level=level)
    optimizer.zero_grad()
    backward(optimizer, pull((model.weight, [[INF, 1.0]])))
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 2.0]]
    optimizer.zero_grad()
    step(optimizer, pull((model.weight, [[1.0, 1.0]])))
    assert model.weight.tolist() == [[0.0, 1.0]]


CLEARED = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(False)": lambda model, optimizer: optimizer.zero_grad(False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad.data.zero_()": lambda model, optimizer: [
        p.grad.data.zero_() for p in model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("first", [1.0, INF], ids=["step", "skipped step"])
@pytest.mark.parametrize("clear", CLEARED.values(), ids=CLEARED.keys())
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_are_gone_however_they_are_cleared(level: str, clear: Any, first: float) -> None:
    model = linear(0.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level=level, loss_scale=16.0)
    step(optimizer, pull((model.weight, [[first]])))
    nn.init.zeros_(model.weight)
    for master in amp.master_params(optimizer):
        master.data.zero_()
    clear(model, optimizer)
    step(optimizer, pull((model.weight, [[4.0]])))
    assert model.weight.item() == -4.0


class WithList(torch.optim.SGD):
    """An optimizer that keeps a list of its own, and does not look into its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.own = [*self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.own:
            param.data.add_(-1.0)


def test_an_optimizer_that_steps_the_model_and_not_the_masters_is_an_error() -> None:
    model = linear(1.0)
    optimizer = WithList(model.parameters())
    initialize(model, optimizer, opt_level="O2")
    with pytest.raises(
        RuntimeError, match=r"amp: WithList\.step\(\) has written the model's param"
    ):
        step(optimizer, pull((model.weight, [[0.25]])))
    assert model.weight.item() == 1.0


@pytest.mark.parametrize("write", [lambda p: p.detach().zero_(), lambda p: p.data.zero_()])
def test_a_write_to_the_model_that_a_step_overwrites_gets_one_warning(write: Any) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    write(model.weight)
    with pytest.warns(RuntimeWarning, match=r"amp: the model's parameter of size \[1, 1\] changed"):
        step(optimizer, pull((model.weight, [[0.25]])))
    write(model.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer, pull((model.weight, [[0.25]])))


@pytest.mark.filterwarnings("error")
def test_weights_that_the_masters_have_too_are_nothing_to_tell() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    model.load_state_dict({"weight": torch.full((1, 1), 0.1)})
    step(optimizer, pull((model.weight, [[0.25]])))
    kept = model.weight.detach().clone()
    model.weight.data.zero_()
    model.weight.data.copy_(kept)
    step(optimizer, pull((model.weight, [[0.25]])))
    (master,) = amp.master_params(optimizer)
    assert torch.equal(model.weight, master.to(model.weight.dtype))


def test_masters_that_change_without_the_model_get_one_warning() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    step(optimizer, pull((model.weight, [[0.25]])))
    inner = torch.optim.SGD(amp.master_params(optimizer), lr=1.0)
    inner.step()
    message = "amp: the float32 master of the model's parameter of"
    with (
        pytest.warns(RuntimeWarning, match=message) as warned,
        amp.scale_loss(pull((model.weight, [[0.25]])), optimizer),
    ):
        pass
    assert warned[0].filename == __file__
    inner.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer, pull((model.weight, [[0.25]])))


def test_a_master_beyond_float16_gets_a_warning() -> None:
    model = linear(1.0)
    optimizer = sgd(model, lr=1e6)
    initialize(model, optimizer, opt_level="O2")
    with pytest.warns(RuntimeWarning, match=r"has come to 250001, beyond 65504"):
        step(optimizer, pull((model.weight, [[-0.25]])))


class OwnArguments(torch.optim.SGD):
    """An optimizer whose methods do not take the arguments of torch's."""

    def zero_grad(self) -> None:
        super().zero_grad()

    def add_param_group(self, param_group: dict[str, Any], rate: float = 1.0) -> None:
        super().add_param_group({**param_group, "lr": rate})

    def state_dict(self, epoch: int = 0) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": epoch}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        assert strict is False
        super().load_state_dict(state_dict)


def test_an_optimizer_with_masters_takes_the_arguments_of_its_own_class() -> None:
    model = nn.Linear(1, 1)
    optimizer = OwnArguments(model.parameters(), lr=1.0)
    initialize(model, optimizer, opt_level="O2")
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}, rate=0.5)
    assert optimizer.param_groups[1]["lr"] == 0.5
    state = optimizer.state_dict(epoch=3)
    assert state["epoch"] == 3
    optimizer.load_state_dict(state, strict=False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_model_and_masters(set_to_none: bool) -> None:
    model = linear(0.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    backward(optimizer, pull((model.weight, [[1.0]])))
    optimizer.zero_grad(set_to_none=set_to_none)
    grads = [model.weight.grad, *(p.grad for p in amp.master_params(optimizer))]
    wanted = None if set_to_none else 0.0
    assert [grad if grad is None else grad.item() for grad in grads] == [wanted, wanted]


def fail_in_a_block(optimizer: Any) -> None:
    with pytest.raises(KeyError), amp.scale_loss(torch.ones(()), optimizer):
        raise KeyError


def skip_a_step(optimizer: Any) -> None:
    models = optimizer._amp_model_of.values()
    step(optimizer, pull(*((param, [[INF]]) for param in models)))
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "event", [None, fail_in_a_block, skip_a_step], ids=["", "failed block", "skipped step"]
)
def test_a_gradient_that_was_set_to_zero_takes_a_step_of_momentum_as_in_float32(event: Any) -> None:
    models = linear(0.0), linear(0.0)
    optimizer = sgd(*models, momentum=0.5)
    initialize([*models], optimizer, opt_level="O2", loss_scale=128.0)
    step(optimizer, pull(*((model.weight, [[1.0]]) for model in models)))
    optimizer.zero_grad(set_to_none=False)
    if event is not None:
        event(optimizer)
    step(optimizer, pull((models[0].weight, [[1.0]])))
    assert [model.weight.item() for model in models] == [-2.5, -1.5]


def test_sparse_gradients_reach_the_masters() -> None:
    model = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(optimizer, model(torch.tensor([1, 2, 1])).sum())
        (master,) = amp.master_params(optimizer)
        assert master.grad.is_sparse
        optimizer.step()
    assert model.weight.flatten().tolist() == [0.0, -4.0, -2.0, 0.0]


@pytest.mark.parametrize("delay_unscale", [False, True])
@levels
def test_gradients_of_several_blocks_add_up(level: str, delay_unscale: bool) -> None:
    model = linear(0.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level=level, max_loss_scale=2.0**10)
    for _ in range(2):
        optimizer.zero_grad()
        for grad in (1.0, 2.0):
            backward(optimizer, pull((model.weight, [[grad]])), delay_unscale=delay_unscale)
        step(optimizer, pull((model.weight, [[4.0]])))
    assert model.weight.item() == -14.0


def test_a_later_group_gets_masters_and_duplicates_are_refused() -> None:
    first, second, third = linear(1.0), linear(1.0), linear(1.0)
    optimizer = sgd(first, lr=1.0)
    initialize([first, second, third], optimizer, opt_level="O2")
    group = {"params": second.parameters(), "lr": 0.5}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    optimizer.add_param_group({"params": third.weight})
    fresh = nn.Parameter(torch.ones(1))  # float32 is its own master
    optimizer.add_param_group({"params": [fresh]})
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32] * 4
    for refused in (first.weight, [second.weight], [*amp.master_params(optimizer)][:1], [fresh]):
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter"):
            optimizer.add_param_group({"params": refused})
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(1))}})
    params = [first.weight, second.weight, third.weight, fresh]
    step(optimizer, pull(*((param, torch.full_like(param, 0.25)) for param in params)))
    assert [param.item() for param in params] == [0.75, 0.875, 0.75, 0.75]


def test_a_later_group_trains_at_o1() -> None:
    first, second = linear(1.0), linear(1.0)
    optimizer = sgd(first)
    initialize([first, second], optimizer, opt_level="O1")
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": first.weight})
    step(optimizer, pull((first.weight, [[0.25]]), (second.weight, [[0.25]])))
    assert [first.weight.item(), second.weight.item()] == [0.75, 0.875]


def test_parameters_may_be_frozen_and_thawed() -> None:
    model = nn.Sequential(linear(1.0), linear(1.0))
    model[0].weight.requires_grad_(False)
    optimizer = sgd(model, lr=2.0**-12)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    step(optimizer, pull((model[1].weight, [[1.0]])))
    assert model[0].weight.item() == 1.0
    assert [p.dtype for p in amp.master_params(optimizer)] == [F16, F32]
    model[0].weight.requires_grad_(True)
    optimizer.zero_grad()
    for _ in range(2):
        step(optimizer, pull((model[0].weight, [[1.0]])))
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32, F32]
    first, second = amp.master_params(optimizer)
    assert [first.item(), second.item()] == [1.0 - 2 * 2.0**-12, 1.0 - 2.0**-12]
    model[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    step(optimizer, pull((model[1].weight, [[1.0]])))
    assert first.item() == 1.0 - 2 * 2.0**-12


def test_a_weight_that_two_models_share_is_one_in_their_optimizers() -> None:
    first, second = linear(1 / 3), linear(0.0)
    second.weight = first.weight
    one, two = sgd(first, lr=1.0), sgd(second, lr=0.5)
    initialize([first, second], [one, two], opt_level="O2")
    assert next(amp.master_params(one)) is next(amp.master_params(two))
    backward([one, two], pull((first.weight, [[2.0**-10]])))
    one.step()
    two.step()
    assert next(amp.master_params(one)).item() == torch.tensor(1 / 3).sub(1.5 * 2.0**-10).item()


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_parameter_of_no_model_is_stepped_too(dtype: torch.dtype) -> None:
    model, loose = linear(1.0), nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=1.0)
    initialize(model, optimizer, opt_level="O2")
    step(optimizer, pull((model.weight, [[0.5]]), (loose, [0.25])))
    assert (model.weight.item(), loose.item(), loose.dtype) == (0.5, 0.75, dtype)
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32, F32]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_moments_of_earlier_float32_training_go_on(level: str) -> None:
    model = linear(1.0)
    optimizer = sgd(model, momentum=0.5)
    groups = [*optimizer.param_groups]
    pull((model.weight, [[1.0]])).backward()
    optimizer.step()
    optimizer.zero_grad()
    initialize(model, optimizer, opt_level=level, max_loss_scale=2.0**10)
    assert [*map(id, optimizer.param_groups)] == [*map(id, groups)]
    (param,) = amp.master_params(optimizer)
    buffer = optimizer.state[param]["momentum_buffer"]
    assert [*optimizer.state] == [param]
    assert (buffer.item(), buffer.dtype) == (1.0, param.dtype)
    step(optimizer, pull((model.weight, [[1.0]])))
    assert model.weight.item() == 1.0 - 1.0 - 1.5


def test_old_gradients_are_added_to_as_without_amp() -> None:
    model = linear(0.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O1")
    model.weight.grad = torch.tensor([[8.0]])
    step(optimizer, pull((model.weight, [[1.0]])))
    assert model.weight.item() == -9.0


# Several models, optimizers and losses.


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_each_loss_has_its_own_scale(level: str) -> None:
    model = linear(0.0)
    optimizer = sgd(model)
    initialize(
        model,
        optimizer,
        opt_level=level,
        num_losses=3,
        loss_scale="dynamic",
        max_loss_scale=2.0**10,
    )
    backward(optimizer, pull((model.weight, [[1.0]])), loss_id=0)
    step(optimizer, pull((model.weight, [[INF]])), loss_id=1)
    assert model.weight.item() == 0.0
    scales = [scaler.loss_scale() for scaler in _amp_state.loss_scalers]
    assert scales == [2.0**10, 2.0**9, 2.0**10]
    optimizer.zero_grad()
    backward(optimizer, pull((model.weight, [[1.0]])), loss_id=2)
    step(optimizer, pull((model.weight, [[2.0]])), loss_id=1)
    assert model.weight.item() == -3.0


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_one_loss_serves_two_optimizers_and_each_skips_its_own_overflows(level: str) -> None:
    models = first, second = linear(0.0), linear(0.0)
    opts = one, two = sgd(first), sgd(second)
    initialize([*models], [*opts], opt_level=level, num_losses=2, max_loss_scale=2.0**10)
    with amp.scale_loss(pull((first.weight, [[1.0]]), (second.weight, [[2.0]])), [*opts]) as loss:
        loss.backward()
    one.step()
    two.step()
    assert (first.weight.item(), second.weight.item()) == (-1.0, -2.0)
    for optimizer in opts:
        optimizer.zero_grad()
    backward(one, pull((first.weight, [[INF]])), loss_id=0)
    backward(two, pull((second.weight, [[2.0]])), loss_id=1)
    one.step()
    two.step()
    assert (first.weight.item(), second.weight.item()) == (-1.0, -4.0)
    with amp.scale_loss(pull((first.weight, [[INF]])), [*opts]) as loss:
        loss.backward()
    one.step()
    two.step()
    assert (first.weight.item(), second.weight.item()) == (-1.0, -4.0)


def test_every_model_casts_its_inputs_not_only_the_last() -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    initialize(models, opt_level="O2")
    assert [model(torch.ones(1, 2)).dtype for model in models] == [F32] * 3


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_gan_trains_as_in_float32(level: str) -> None:
    def run(models: list[Any], opts: list[Any], scale: Any) -> list[float]:
        generator, critic = models
        optimizer_g, optimizer_d = opts
        losses = []
        for number in range(4):
            torch.manual_seed(number)
            real, noise = torch.randn(4, 2), torch.randn(4, 2)
            optimizer_d.zero_grad()
            fake = generator(noise)
            for loss_id, part in enumerate([-critic(real), critic(fake.detach())]):
                with scale(part.float().mean(), optimizer_d, loss_id) as loss:
                    loss.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = -critic(fake).float().mean()
            with scale(loss_g, optimizer_g, 2) as loss:
                loss.backward()
            optimizer_g.step()
            losses.append(loss_g.item())
        return losses

    generators, critics = twins(lambda: nn.Linear(2, 2)), twins(lambda: linear(1.0, -1.0))

    class Plain:
        def __init__(self, loss: Tensor, *_: Any) -> None:
            self.loss = loss

        def __enter__(self) -> Tensor:
            return self.loss

        def __exit__(self, *_: Any) -> None: ...

    plain = [generators[0], critics[0]]
    expected = run(plain, [sgd(model, lr=0.1) for model in plain], Plain)
    models = [generators[1], critics[1]]
    opts = [sgd(model, lr=0.1) for model in models]
    initialize(models, opts, opt_level=level, num_losses=3, max_loss_scale=2.0**10)
    losses = run(models, opts, amp.scale_loss)
    # Losses of size 1 from two products, rounded to float16 a few times a step.
    torch.testing.assert_close(losses, expected, rtol=0, atol=0.0 if level == "O0" else 5e-3)


@levels
def test_models_without_optimizers_compute(level: str) -> None:
    model, reference = twins(Net)
    images, _ = next(batches(1))
    with torch.no_grad():
        expected = reference.eval()(images)
        initialize(model.eval(), opt_level=level)
        torch.testing.assert_close(model(images).float(), expected, rtol=0, atol=5e-3)


# Steps.


def test_a_closure_sees_new_weights_in_each_evaluation() -> None:
    model = linear(2.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    seen = []

    def closure() -> Tensor:
        seen.append(model.weight.item())
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 1)) ** 2 / 2).sum()
        backward(optimizer, loss)
        return loss

    optimizer.step(closure)
    # The first move of LBFGS is limited to 1; then it knows the curvature.
    assert seen[:3] == [2.0, 1.0, 0.0]
    assert model.weight.item() == 0.0


def test_a_line_search_that_is_given_up_leaves_model_and_masters_as_they_were() -> None:
    model = linear(1 / 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    initialize(model, optimizer, opt_level="O2", loss_scale=1.0)
    before = model.weight.item(), next(amp.master_params(optimizer)).item()
    grads = iter([1.0, INF, INF])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pull((model.weight, [[next(grads)]]))
        backward(optimizer, loss)
        return loss

    assert optimizer.step(closure) is None
    assert (model.weight.item(), next(amp.master_params(optimizer)).item()) == before


def test_hooks_after_a_step_see_the_new_weights() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.item()))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.weight.item()))
    step(optimizer, pull((model.weight, [[0.5]])))
    assert seen == [1.0, 0.5]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("error")
def test_schedulers_made_before_or_after_drive_the_steps(level: str, before: bool) -> None:
    model = linear(0.0)
    optimizer = sgd(model, lr=1.0)

    def schedule() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    scheduler = schedule() if before else None
    initialize(model, optimizer, opt_level=level, max_loss_scale=2.0**10)
    scheduler = scheduler or schedule()
    weights = []
    for grad in (1.0, INF, 1.0):
        optimizer.zero_grad()
        step(optimizer, pull((model.weight, [[grad]])))
        scheduler.step()
        weights.append(model.weight.item())
    assert weights == [-1.0, -1.0, -1.25]


def test_an_optimizers_state_dict_is_that_of_its_class() -> None:
    model, plain = Net(), Net()
    optimizer, other = (torch.optim.Adam(each.parameters()) for each in (model, plain))
    initialize(model, optimizer, opt_level="O2")
    train(model, optimizer, 1)
    train_plain(plain, other, 1)
    ours, theirs = optimizer.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert ours["param_groups"] == theirs["param_groups"]

    def described(states: Any) -> Any:
        return {
            number: {key: (value.dtype, value.shape) for key, value in state.items()}
            for number, state in states["state"].items()
        }

    assert described(ours) == described(theirs)


# Overflows.


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("level", "loss_scale"),
    [("O1", None), ("O1", 1.0), ("O1", 128.0), ("O2", None), ("O2", "128.0"), ("O3", None)],
)
@optimizers
def test_inf_never_reaches_the_weights(
    make: Any, level: str, loss_scale: Any, dtype: torch.dtype
) -> None:
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters())
    initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, dtype=dtype)
    state = copy.deepcopy(model.state_dict())
    for bad in (INF, float("nan")):
        optimizer.zero_grad()
        step(optimizer, pull((model.weight, [[1.0, bad]]), (model.bias, [1.0])))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    optimizer.zero_grad()
    step(optimizer, pull((model.weight, [[1.0, 1.0]]), (model.bias, [1.0])))
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert not torch.equal(model.weight.float(), state["weight"].float())


def test_o0_yields_the_loss_in_float32_and_leaves_gradients_alone() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O0")
    for loss in (model.weight.sum().half(), model.weight.sum()):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss.dtype is F32
            assert scaled_loss.item() == loss.item()
    model.weight.grad = grad = torch.tensor([[INF]])
    backward(optimizer, pull((model.weight, [[1.0]])))
    assert model.weight.grad is grad
    optimizer.step()
    assert model.weight.item() == -INF  # float32 training as it is


def test_o0_with_a_scale_scales() -> None:
    model = linear(0.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O0", loss_scale=4.0)
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        assert model.weight.grad.item() == 4.0
    optimizer.step()
    assert model.weight.item() == -1.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_printed_with_the_parameters_that_overflowed(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(OrderedDict(first=linear(1.0, 1.0), second=linear(1.0, 1.0)))
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level=level, num_losses=2, verbosity=1)
    capsys.readouterr()

    def bad() -> Tensor:
        return pull((model.first.weight, [[INF, 0.5]]), (model.second.weight, [[0.5, 0.5]]))

    step(optimizer, bad(), loss_id=1)
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 32768.0\n"
        "  first.weight [1, 2]: 1 inf, 0 NaN\n"
    )
    optimizer.zero_grad()
    _amp_state.verbosity = 0
    step(optimizer, bad())
    assert capsys.readouterr().out == ""


def test_with_several_models_the_message_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    models = [linear(1.0), linear(1.0)]
    optimizer = sgd(*models)
    initialize(models, optimizer, opt_level="O2", loss_scale=128.0, verbosity=1)
    capsys.readouterr()
    step(optimizer, pull((models[1].weight, [[float("nan")]])))
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 which keeps its loss scale of 128.0\n"
        "  model 1: weight [1, 1]: 0 inf, 1 NaN\n"
    )


def test_a_scale_stays_between_its_bounds() -> None:
    model = linear(1.0)
    optimizer = sgd(model, lr=0.0)
    initialize(
        model,
        optimizer,
        opt_level="O2",
        min_loss_scale=2.0**14,
        max_loss_scale=2.0**15,
        num_losses=2,
    )
    (first, second) = _amp_state.loss_scalers
    assert first.loss_scale() == second.loss_scale() == 2.0**15
    for _ in range(3):
        optimizer.zero_grad()
        step(optimizer, pull((model.weight, [[INF]])))
    assert (first.loss_scale(), second.loss_scale()) == (2.0**14, 2.0**15)
    for scaler in (first, second):
        scaler._unskipped = 1999
    for loss_id in (0, 1):
        optimizer.zero_grad()
        step(optimizer, pull((model.weight, [[1.0]])), loss_id=loss_id)
    assert (first.loss_scale(), second.loss_scale()) == (2.0**15, 2.0**15)


def test_delay_overflow_check_skips_the_step_all_the_same() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    backward(optimizer, pull((model.weight, [[INF]])), delay_overflow_check=True)
    step(optimizer, pull((model.weight, [[1.0]])))
    assert model.weight.item() == 1.0
    model.zero_grad(set_to_none=False)
    step(optimizer, pull((model.weight, [[0.25]])))
    assert model.weight.item() == 0.75


# amp.scale_loss, amp.disable_casts, amp.master_params.


def test_scale_loss_wants_initialize_first() -> None:
    model = linear(1.0)
    with (
        pytest.raises(
            RuntimeError,
            match="Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized"
            r"\.  model, optimizer = amp\.initialize\(model, optimizer, opt_level=\.\.\.\) must be "
            r"called before `with amp\.scale_loss`\.",
        ),
        amp.scale_loss(model.weight.sum(), sgd(model)),
    ):
        pass


@pytest.mark.parametrize("loss_id", [1, -1])
def test_scale_loss_refuses_a_loss_id_without_a_scale(loss_id: int) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    with (
        pytest.raises(ValueError, match=rf"loss_id is {loss_id}; .* num_losses .* which is 1"),
        amp.scale_loss(model.weight.sum(), optimizer, loss_id=loss_id),
    ):
        pass


def test_disable_casts_switches_casts_off_for_a_block_and_on_again_after_an_error() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O1")
    x = torch.ones(1, 1)
    with amp.disable_casts():
        loss = model(x).sum()
        assert loss.dtype is F32
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # scaling is another matter
            assert scaled_loss.item() == 2.0**16
            scaled_loss.backward()
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert model(x).dtype is F16


def test_disable_casts_does_nothing_where_there_are_none() -> None:
    with amp.disable_casts():
        pass
    model = linear(1.0)
    initialize(model, opt_level="O2")
    with amp.disable_casts():
        assert model(torch.ones(1, 1)).dtype is F32


def test_master_params_are_what_an_optimizer_steps() -> None:
    model = linear(1.0)
    plain = sgd(model)
    assert [*amp.master_params(plain)] == [model.weight]
    half = linear(1.0).half()
    wrapped = fp16_utils.FP16_Optimizer(sgd(half), verbose=False)
    (master,) = amp.master_params(wrapped)
    assert master is wrapped.fp32_from_fp16_groups[0][0]
    initialize(model, plain, opt_level="O2")
    (master,) = amp.master_params(plain)
    assert (master.dtype, master is model.weight) == (F32, False)


# Copies, compilation, parallel training.


def count_tensors() -> int:
    while gc.collect():  # Those of earlier tests that die by and by.
        pass
    return sum(Tensor in type(each).__mro__ for each in gc.get_objects())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_copy_of_a_model_is_its_own(level: str, how: Any) -> None:
    model = Net()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    initialize(model, optimizer, opt_level=level)
    train(model, optimizer, 1)
    tensors = count_tensors()
    ema = how(model)
    more = count_tensors() - tensors
    assert more == len([*ema.parameters(), *ema.buffers()])  # no masters, no optimizer's state
    before = copy.deepcopy(ema.state_dict())
    images, _ = next(batches(1))
    expected = ema.eval()(images)
    train(model, optimizer, 1)
    for name, value in ema.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(ema(images), expected)
    # The usual way of an average, which writes to what state_dict() returns.
    for mine, theirs in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        if mine.is_floating_point():
            mine.mul_(0.5).add_(theirs, alpha=0.5)
    for name, value in ema.state_dict().items():
        if value.is_floating_point():
            mean = (before[name].float() + model.state_dict()[name].float()) / 2
            torch.testing.assert_close(value.float(), mean, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_can_be_compiled_afterwards(level: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))

    class Flat(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    model, reference = twins(lambda: Flat(*make()))
    expected = train_plain(reference, OPTIMIZERS["SGD"](reference.parameters()), 5)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    initialize(model, optimizer, opt_level=level)
    compiled = torch.compile(model, backend="aot_eager")
    losses = train(compiled, optimizer, 5)
    torch.testing.assert_close(losses, expected, rtol=0, atol=2e-3)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_can_be_made_parallel_afterwards_but_not_before(level: str) -> None:
    model, reference = twins(Net)
    expected = train_plain(reference, OPTIMIZERS["SGD"](reference.parameters()), 3)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    initialize(model, optimizer, opt_level=level)
    parallel = nn.parallel.DistributedDataParallel(model)
    losses = train(parallel, optimizer, 3)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-3)
    assert parallel.state_dict()["module.conv.weight"].dtype is F32
    with pytest.raises(RuntimeError, match="Parallel wrappers should only be applied to the model"):
        initialize(parallel, opt_level=level)


def test_fused_adam_steps_masters_as_torch_does() -> None:
    model, twin = twins(lambda: linear(1.0, 2.0))
    ours, theirs = (
        FusedAdam(model.parameters()),
        torch.optim.AdamW(twin.parameters(), weight_decay=0),
    )
    for each, optimizer in ((model, ours), (twin, theirs)):
        initialize(each, optimizer, opt_level="O2")
        for number in range(3):
            optimizer.zero_grad()
            step(optimizer, pull((each.weight, [[0.5, -number]])))
    torch.testing.assert_close(
        next(amp.master_params(ours)), next(amp.master_params(theirs)), rtol=1e-6, atol=0
    )


def after_a_step(model: Any, optimizer: Any) -> None:
    step(optimizer, pull((model.weight, [[1.0]])))


def after_a_skipped_step(model: Any, optimizer: Any) -> None:
    step(optimizer, pull((model.weight, [[INF]])))


def after_a_block_that_raised(model: Any, optimizer: Any) -> None:
    after_a_step(model, optimizer)

    def interrupted() -> None:
        with amp.scale_loss(pull((model.weight, [[1.0]])), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()


EARLIER = {
    "at first": lambda *_: None,
    "after a step": after_a_step,
    "after a skipped step": after_a_skipped_step,
    "after a block that raised": after_a_block_that_raised,
}
earlier = pytest.mark.parametrize("come_here", EARLIER.values(), ids=EARLIER.keys())


@earlier
def test_a_backward_outside_of_scale_loss_is_refused_by_the_step_of_o2(come_here: Any) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    come_here(model, optimizer)
    weight = model.weight.item()
    model.zero_grad()
    pull((model.weight, [[1.0]])).backward()
    with pytest.raises(RuntimeError, match="not in those of its float32 masters; call backward in"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert model.weight.item() == weight


@pytest.mark.parametrize(
    ("come_here", "clear"),
    [
        (how, clear)
        for how in EARLIER
        for clear in CLEARED
        # After a step the masters keep its gradient, for another step with it.
        if how != "after a step" or clear.startswith("optimizer")
    ],
)
def test_cleared_gradients_are_no_backward(come_here: str, clear: str) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    EARLIER[come_here](model, optimizer)
    weight = model.weight.item()
    CLEARED[clear](model, optimizer)
    optimizer.step()
    assert model.weight.item() == weight


@earlier
def test_a_step_without_any_backward_uses_what_the_last_one_left(come_here: Any) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    come_here(model, optimizer)
    weight = model.weight.item()
    optimizer.step()
    assert model.weight.item() == weight - (come_here is after_a_step)


def test_edits_of_the_models_gradients_after_scale_loss_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    for _ in range(2):
        optimizer.zero_grad()
        backward(optimizer, pull((model.weight, [[0.25]])))
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.125)
        optimizer.step()
    assert (model.weight.item(), caplog.messages) == (0.75, [])
    for _ in range(2):
        optimizer.zero_grad()
        backward(optimizer, pull((model.weight, [[0.25]])))
        nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        optimizer.step()
    assert model.weight.item() == 0.25
    (message,) = caplog.messages
    assert "which has no effect: clip, edit and average those of amp.master_params" in message


def test_an_optimizer_that_initialize_never_saw_is_refused_by_scale_loss() -> None:
    model = amp.initialize(torch.nn.Linear(2, 1), opt_level="O2", verbosity=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 2)).sum()
    with (
        pytest.raises(RuntimeError, match=r"did not go through amp\.initialize"),
        amp.scale_loss(loss, optimizer),
    ):
        raise AssertionError("the block must not be entered")


def test_a_level_in_the_place_of_enabled_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"A level is given to amp\.initialize as opt_level="):
        amp.initialize(model, None, "O2")
    assert model.weight.dtype is torch.float32
