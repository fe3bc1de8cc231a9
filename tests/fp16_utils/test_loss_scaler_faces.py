"""The loss scalers of apex.fp16_utils: the names and the numbers of 2019 around the one rule."""

import io
import itertools
import math

import pytest
import torch

from apex_mp.loss_scale import FP16_UTILS_PRESET
from apex_mp.scale.fp16_scalers import DynamicLossScaler, LossScaler


def param_with_grad(grad: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros_like(grad, layout=torch.strided))
    param.grad = grad
    return param


def calls_that_change_the_scale(scaler: DynamicLossScaler, overflows: list[bool]) -> list[int]:
    changed = []
    for index, overflow in enumerate(overflows):
        before = scaler.loss_scale
        scaler.update_scale(overflow)
        if scaler.loss_scale != before:
            changed.append(index)
    return changed


def test_the_scalers_start_with_the_numbers_of_2019() -> None:
    assert LossScaler().loss_scale == LossScaler().cur_scale == 1.0
    assert LossScaler(128).loss_scale == 128.0
    scaler = DynamicLossScaler()
    assert (scaler.cur_scale, scaler.loss_scale) == (2.0**32, 2.0**32)
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (0, -1)
    assert (scaler.scale_factor, scaler.scale_window) == (2.0, 1000)
    assert scaler.loss_scale_value == FP16_UTILS_PRESET


@pytest.mark.parametrize("init_scale", [2.0**32, 4.0])
@pytest.mark.parametrize("window", [1, 3, 4])
def test_the_attributes_walk_every_sequence_as_in_2019(init_scale: float, window: int) -> None:
    for overflows in itertools.product([False, True], repeat=12):
        scaler = DynamicLossScaler(init_scale=init_scale, scale_window=window)
        cur_scale, last_overflow_iter = init_scale, -1
        for cur_iter, overflow in enumerate(overflows):
            if overflow:
                cur_scale = max(cur_scale / 2.0, 1)
                last_overflow_iter = cur_iter
            elif (cur_iter - last_overflow_iter) % window == 0:
                cur_scale *= 2.0
            scaler.update_scale(overflow)
            ours = (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter)
            assert ours == (cur_scale, cur_iter + 1, last_overflow_iter), overflows


def test_written_attributes_decide_the_next_update() -> None:
    scaler = DynamicLossScaler(scale_window=10)
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 64.0, 108, 99
    assert scaler.loss_scale_value.good_steps == 8
    assert calls_that_change_the_scale(scaler, [False] * 3) == [1]
    assert scaler.cur_scale == 128.0
    scaler.scale_window, scaler.scale_factor = 2, 4.0
    scaler.update_scale(True)
    assert (scaler.cur_scale, scaler.last_overflow_iter) == (32.0, 111)
    assert calls_that_change_the_scale(scaler, [False] * 2) == [1]
    assert scaler.cur_scale == 128.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale_factor": 1}, ValueError, "scale_factor is 1; it must be above 1"),
        ({"scale_factor": 0.0}, ValueError, "scale_factor is 0.0; it must be above 1"),
        ({"scale_factor": math.nan}, ValueError, "scale_factor is nan; it must be above 1"),
        ({"scale_window": 0}, ValueError, "scale_window is 0; it must be at least 1"),
        ({"scale_window": 2.5}, TypeError, "growth_interval is 2.5; it must be an int"),
        ({"init_scale": 0}, ValueError, "scale is 0; it must lie in"),
        ({"init_scale": "dynamic"}, TypeError, "scale is 'dynamic'; it must be a number"),
        ({"hysteresis": 0}, ValueError, "hysteresis is 0; it must lie in"),
        ({"max_loss_scale": 0.5}, ValueError, "max_scale is 0.5; it must lie in"),
    ],
)
def test_a_wrong_argument_raises_a_sentence(
    arguments: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DynamicLossScaler(**arguments)  # type: ignore[arg-type]


def test_a_static_scaler_refuses_a_scale_of_zero_and_ignores_overflows() -> None:
    with pytest.raises(ValueError, match="StaticLossScale: scale is 0; it must lie in"):
        LossScaler(0)
    scaler = LossScaler(128.0)
    scaler.update_scale(True)
    assert scaler.loss_scale == 128.0
    assert scaler.has_overflow([param_with_grad(torch.tensor([math.inf]))]) is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 8, 16])
def test_has_overflow_finds_one_bad_element(
    dtype: torch.dtype, bad: float, where: int, device: torch.device
) -> None:
    # On CUDA the others are on the CPU: gradients may lie on several devices.
    grad = torch.zeros(17, dtype=dtype, device=device)
    params = [torch.nn.Parameter(torch.zeros(2)), param_with_grad(grad)]
    params.insert(where % 3, param_with_grad(torch.ones(3, dtype=torch.float16)))
    scaler = DynamicLossScaler()
    assert scaler.has_overflow(params) is False
    grad[where] = bad
    assert scaler.has_overflow(params) is True
    assert scaler.has_overflow(iter(params)) is True
    assert DynamicLossScaler._has_inf_or_nan(grad) is True


def test_has_overflow_is_not_fooled_by_finite_gradients_whose_sum_is_infinite(
    device: torch.device,
) -> None:
    grad = torch.full((8,), torch.finfo(torch.float32).max, device=device)
    assert not math.isfinite(float(grad.sum()))
    assert DynamicLossScaler().has_overflow([param_with_grad(grad)]) is False
    assert DynamicLossScaler._has_inf_or_nan(grad) is False


@pytest.mark.parametrize(("value", "expected"), [(1.0, False), (math.nan, True)])
def test_has_overflow_reads_sparse_gradients(
    value: float, expected: bool, device: torch.device
) -> None:
    indices, values = torch.tensor([[1, 1]]), torch.tensor([value, 2.0])
    grad = torch.sparse_coo_tensor(indices, values, (4,)).to(device)
    assert DynamicLossScaler().has_overflow([param_with_grad(grad)]) is expected


@pytest.mark.parametrize("scaler", [LossScaler(8.0), DynamicLossScaler(8.0)])
def test_backward_scales_the_gradients(
    scaler: LossScaler | DynamicLossScaler, device: torch.device
) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True, device=device)
    loss = (weight * weight).sum()
    scaler.backward(loss, retain_graph=True)
    assert weight.grad is not None
    assert weight.grad.tolist() == [16.0, 32.0]
    scaler.backward(loss)
    assert weight.grad.tolist() == [32.0, 64.0]
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(loss)


@pytest.mark.parametrize("scaler", [LossScaler(8.0), DynamicLossScaler(8.0)])
def test_scale_gradient_scales_what_a_backward_hook_receives(
    scaler: LossScaler | DynamicLossScaler,
) -> None:
    module = torch.nn.Linear(1, 1)
    scaled = scaler.scale_gradient(module, (torch.tensor([1.0]), None), (torch.tensor([5.0]),))
    assert isinstance(scaled, tuple)
    assert scaled[0] is not None
    assert scaled[0].tolist() == [8.0]
    assert scaled[1] is None


def test_state_travels_through_a_weights_only_checkpoint() -> None:
    scaler = DynamicLossScaler(2.0**8, 4.0, 5, max_loss_scale=2.0**12, hysteresis=2)
    for overflow in (False, True, False, False):
        scaler.update_scale(overflow)
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    restored = DynamicLossScaler()
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert vars(restored) == vars(scaler)
    static = LossScaler(1.0)
    static.load_state_dict(LossScaler(64.0).state_dict())
    assert static.loss_scale == 64.0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"cur_scale": 8.0, "cur_iter": 1}, r"keys \['last_overflow_iter'\] are missing"),
        (
            {"cur_scale": 8.0, "cur_iter": 1, "last_overflow_iter": 0, "unskipped": 3},
            r"\['unskipped'\] unknown",
        ),
        ({"cur_scale": 0.0, "cur_iter": 1, "last_overflow_iter": 0}, "scale is 0.0; it must lie"),
    ],
)
def test_a_state_dict_that_is_refused_changes_nothing(
    state: dict[str, float], message: str
) -> None:
    scaler = DynamicLossScaler()
    before = dict(vars(scaler))
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(state)
    assert vars(scaler) == before


WRONG_VALUES = {
    "cur_scale": [0.0, -2.0, math.nan, math.inf, "8", None, True, [8.0], torch.ones(2)],
    "cur_iter": ["7", None, 7.5],
    "last_overflow_iter": ["7", None, 7.5],
    "scale_factor": [1.0, 0.0, math.nan, "2", None],
    "scale_window": [0, -3, 2.5, "2", None],
    "min_loss_scale": [-1.0, math.nan, "1"],
    "max_loss_scale": [0.5, math.nan, "1"],
    "hysteresis": [0, 1.5, "1", None],
    "overflows": [-1, 1.5, "1", None],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values]
)
def test_one_wrong_value_in_a_state_dict_changes_nothing(key: str, value: object) -> None:
    scaler = DynamicLossScaler(2.0**8, 4.0, 5, max_loss_scale=2.0**12, hysteresis=2)
    scaler.update_scale(True)
    before = dict(vars(scaler))
    state = {**DynamicLossScaler(2.0**6, 3.0, 7, max_loss_scale=2.0**9).state_dict()}
    state[key] = value
    with pytest.raises((TypeError, ValueError)):
        scaler.load_state_dict(state)
    assert vars(scaler) == before


def test_an_object_pickled_in_2019_gets_the_attributes_added_since() -> None:
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    scaler.__setstate__(
        {
            "cur_scale": 64.0,
            "cur_iter": 9,
            "last_overflow_iter": -1,
            "scale_factor": 2.0,
            "scale_window": 10,
        }
    )
    scaler.update_scale(False)
    assert scaler.cur_scale == 128.0


def test_the_initial_scale_is_cut_to_the_maximum() -> None:
    assert DynamicLossScaler(max_loss_scale=2**24).cur_scale == 2.0**24
