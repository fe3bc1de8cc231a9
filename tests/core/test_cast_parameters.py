"""cast_parameters, and the warning of buffers that other casts round."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32
from torch import Tensor, nn

from apex_mp import amp, cast_parameters
from apex_mp.fp16_utils import FP16Model, convert_network, network_to_half
from apex_mp.optimizers import FusedAdam

SIZE = 16


class RootMeanSquareNorm(nn.Module):
    """A norm that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


class Rotary(nn.Module):
    """The frequencies of a rotary embedding (Su et al. 2021), as in Llama."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, SIZE, 2, dtype=F32) / SIZE)
        self.register_buffer("inv_freq", frequencies)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[0])[:, None] * torch.cat([self.inv_freq] * 2)
        return x * angles.cos().to(x.dtype)


class Model(nn.Module):
    """Of each sort: parameters, norms, buffers that 16 bits round, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.batch = nn.BatchNorm1d(SIZE)
        self.layer = nn.LayerNorm(SIZE)
        self.own = RootMeanSquareNorm()
        self.rotary = Rotary()
        self.register_buffer("mask", torch.tensor([0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rotary(self.own(self.layer(self.batch(self.first(x)))))
        return out


KEPT = [
    *("batch.weight", "batch.bias"),
    *("mask", "batch.running_mean", "batch.running_var", "rotary.inv_freq"),
]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_parameters_are_cast_and_norms_and_buffers_are_kept(
    dtype: torch.dtype, device: torch.device
) -> None:
    model = Model().to(device)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before, values = [*model.parameters()], {k: v.clone() for k, v in model.state_dict().items()}
    assert cast_parameters(model, dtype) == KEPT
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert model.first.weight.grad.dtype is dtype
    for name, value in model.state_dict().items():
        if name != "batch.num_batches_tracked":
            assert value.dtype is (F32 if name in KEPT else dtype), name
            assert torch.equal(value, values[name].to(value.dtype))


def test_a_cast_model_trains_with_16_bit_activations(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    cast_parameters(model)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    scaler = amp.GradScaler(device.type, model=model)
    data = torch.randn(8, SIZE, device=device).half()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        out = model(data)
        assert out.dtype is F16
        loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model.batch.running_mean is not None
    assert model.batch.running_mean.dtype is F32
    assert model.rotary.inv_freq.dtype is F32


@pytest.mark.parametrize(
    ("keep", "layers"), [("layer", F32), ([nn.LayerNorm], F32), (["own"], F16)], ids=str
)
def test_what_is_kept_can_be_chosen(keep: Any, layers: torch.dtype) -> None:
    model = Model()
    cast_parameters(model, keep=keep)
    assert model.layer.weight.dtype is layers
    assert model.own.weight.dtype is (F16 if layers is F32 else F32)
    assert model.batch.weight.dtype is F32
    assert model(torch.ones(2, SIZE).half()).dtype is F16


def test_what_an_earlier_half_has_rounded_is_float32_from_now_on(device: torch.device) -> None:
    """But for buffers of which nobody knows what they were, which get a warning."""
    model = Model().to(device).half()
    with pytest.warns(RuntimeWarning, match="the 16-bit buffer batch.running_mean and"):
        kept = cast_parameters(model, BF16)
    assert kept == ["batch.weight", "batch.bias", "batch.running_mean", "batch.running_var"]
    assert model(torch.ones(2, SIZE, device=device).bfloat16()).dtype is BF16
    assert model.rotary.inv_freq.dtype is F16


def test_a_parameter_of_a_batch_norm_and_of_a_layer_is_refused() -> None:
    model = Model()
    model.first.bias = model.batch.bias
    with pytest.raises(ValueError, match=r"first.bias is a parameter of a part that is to stay"):
        cast_parameters(model)
    assert model.first.weight.dtype is F32


def test_all_names_of_a_shared_buffer_are_returned() -> None:
    model = nn.Sequential(Rotary(), Rotary())
    model[1].inv_freq = model[0].inv_freq
    assert cast_parameters(model) == ["0.inv_freq", "1.inv_freq"]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((7,), {}, TypeError, "model is a int; it must be a Module"),
        ((Model(), F32), {}, ValueError, "dtype is torch.float32; it must be torch.float16 or"),
        ((Model(),), {"keep": "head"}, ValueError, "cast_parameters: there is no 'head' in the"),
        ((Model(),), {"keep": 7}, TypeError, "cast_parameters: keep has 7; it must be the name"),
    ],
    ids=["model", "dtype", "keep", "no name"],
)
def test_bad_arguments_change_nothing(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cast_parameters(*arguments, **options)
    if isinstance(arguments[0], nn.Module):
        assert {param.dtype for param in arguments[0].parameters()} == {F32}


# --- Other casts.


def by_level(level: str) -> Callable[[nn.Module], Any]:
    return lambda model: amp.initialize(model, opt_level=level, verbosity=0)


def by_scaler(model: nn.Module) -> None:
    for _ in range(2):  # The second one does not warn again.
        amp.GradScaler("cpu", model=model.half())


def by_scaler_before(model: nn.Module) -> None:
    """The model becomes float16 after the scaler was made."""
    scaler = amp.GradScaler("cpu", model=model)
    optimizer = FusedAdam(model.half().parameters(), master_weights=True)
    for _ in range(2):  # It warns once.
        scaler.scale(model(torch.ones(2, SIZE).half()).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


CASTS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "network_to_half": (network_to_half, "network_to_half"),
    "convert_network": (lambda model: convert_network(model, F16), "convert_network"),
    "FP16Model": (FP16Model, "FP16Model"),
    "O2": (by_level("O2"), "amp.initialize"),
    "O3": (by_level("O3"), "amp.initialize"),
    "GradScaler": (by_scaler, "GradScaler"),
    "GradScaler before half()": (by_scaler_before, "GradScaler"),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_buffer_that_16_bits_round_gets_one_warning(name: str) -> None:
    cast, who = CASTS[name]
    with pytest.warns(RuntimeWarning) as caught:
        cast(nn.Sequential(nn.Linear(SIZE, SIZE), Rotary()))
    (message,) = [str(each.message) for each in caught]
    assert message.startswith(f"{who}: the 16-bit buffer 1.inv_freq of the model may be rounded")


@pytest.mark.parametrize("name", CASTS)
def test_masks_and_buffers_that_were_kept_get_none(name: str) -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE))
    model.register_buffer("mask", torch.tensor([0.0, 1.0, -65504.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CASTS[name][0](model)
    whole = nn.Sequential(nn.Linear(SIZE, SIZE), Rotary())
    cast_parameters(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.GradScaler("cpu", model=whole)


def test_buffers_that_cannot_be_read_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(2).half().to_sparse())
    model.register_buffer("meta", torch.empty(2, device="meta", dtype=F16))
    by_scaler(model)


def test_running_statistics_get_a_warning_at_their_start() -> None:
    with pytest.warns(RuntimeWarning, match="0.running_mean and 1 more buffer of the model"):
        by_scaler(nn.Sequential(nn.BatchNorm1d(SIZE)))


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "the older spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_buffers_that_make_a_weight_are_cast_with_it(
    make: Callable[[Any], nn.Module], dtype: torch.dtype
) -> None:
    model = nn.Sequential(make(nn.Linear(SIZE, SIZE)), nn.BatchNorm1d(SIZE))
    kept = make(nn.Linear(SIZE, SIZE))
    whole = nn.Sequential(model, kept)
    cast_parameters(whole, dtype, keep="1")
    assert {t.dtype for t in (*model[0].parameters(), *model[0].buffers())} == {dtype}
    assert {t.dtype for t in (*kept.parameters(), *kept.buffers())} == {F32}
    assert model[1].running_mean.dtype == F32
    out = whole(torch.randn(4, SIZE).to(dtype))
    out.float().square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.GradScaler("cpu", model=make(nn.Linear(SIZE, SIZE)).half())
