"""amp.initialize: what models, optimizers and losses do at the levels O0 to O3."""

from __future__ import annotations

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
    linear,
    optimizers,
    sgd,
    step,
    train,
    train_plain,
    twins,
)
from fp16_cases import pull
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp import _amp_state

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("amp_off"),
    pytest.mark.filterwarnings("ignore:.*buffers have no masters"),
]


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


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


# Overflows.


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


@pytest.mark.slow
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
