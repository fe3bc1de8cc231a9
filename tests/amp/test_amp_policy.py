"""Every function that the lists name runs in the precision that they say, on CPU and on CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import amp_cases
import pytest
import torch
from amp_cases import Maker
from torch._subclasses import FakeTensorMode

from apex_mp import amp
from apex_mp.amp.casts import policy
from apex_mp.amp.casts.policy import Rule
from apex_mp.amp.lists import tensor_overrides

pytestmark = pytest.mark.usefixtures("amp_off")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SETTINGS = {
    f"{device}-{name}-{'verbose' if verbose else 'ordinary'}": (device, dtype, verbose)
    for device in ("cpu", "cuda")
    for name, dtype, verbose in (("fp16", F16, False), ("fp16", F16, True), ("bf16", BF16, False))
}
in_all_settings = pytest.mark.parametrize(
    ("policy_of", "low", "verbose"), SETTINGS.values(), ids=SETTINGS
)
# Calls that need more than the dtypes and shapes of their arguments, by name and number.
NEED_A_GPU = {
    *[("equal", 0), ("grid_sample", 0), ("ctc_loss", 0), ("ctc_loss", 1)],
    ("gru_cell", 0),
    *[(layer, call) for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu") for call in (0, 1)],
}
COMPARISONS = {"eq", "equal", "ge", "gt", "le", "lt", "ne"}


@contextlib.contextmanager
def casts(policy_of: str, device: torch.device, **options: Any) -> Iterator[None]:
    """Switch casts on; where there is no GPU, CUDA's are shown by tensors without numbers."""
    amp.init(device_type=policy_of, **options)
    with FakeTensorMode() if policy_of != device.type == "cpu" else contextlib.nullcontext():
        yield


def dtype_of_result(rule: Rule, dtypes: tuple[torch.dtype, ...], low: torch.dtype) -> torch.dtype:
    """What the policy says of a call with arguments of these dtypes."""
    if F64 in dtypes:
        return F64
    if rule.kind == policy.LOW:
        return low
    if rule.kind == policy.MATCH:
        return dtypes[0]
    return F32 if rule.kind == policy.FLOAT or F32 in dtypes else low


def outcome(rule: Rule, make: amp_cases.Make, maker: Maker) -> Any:
    """Return the dtypes of what a call gives; for an error its text."""
    made = make(maker)
    try:
        result = getattr(rule.owner, rule.name)(*made.args, **made.kwargs)
    except Exception as error:  # All that are wrong are to be seen at once.
        return str(error).splitlines()[0]
    if rule.kind == policy.MATCH and result is not made.args[0]:
        return "not in place"
    return {t.dtype for t in amp_cases.floats_in(result)} or "no floats"


# amp_cases makes the weights of recurrent layers one by one, which cuDNN does not like.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@in_all_settings
def test_every_listed_function_gives_the_dtype_that_the_policy_says(
    policy_of: str, low: torch.dtype, verbose: bool, device: torch.device
) -> None:
    wrong = []
    with casts(policy_of, device, dtype=low, verbose=verbose, allow_banned=True):
        for rule in policy.rules(allow_banned=True):
            if rule.kind in (policy.REFUSE, policy.REFUSE_FIRST):
                continue
            is_comparison = rule.kind == policy.PROMOTE and rule.name.strip("_") in COMPARISONS
            for number, make in enumerate(amp_cases.calls(rule.name)):
                if (rule.name, number) in NEED_A_GPU and policy_of != device.type:
                    continue
                for dtypes in [(F32,), (low,), (low, F32), (F32, low), (F64,)]:
                    found = outcome(rule, make, Maker(*dtypes, device=policy_of))
                    right: Any = {dtype_of_result(rule, dtypes, low)}
                    if found != ("no floats" if is_comparison else right):
                        wrong.append(
                            f"{rule.library}.{rule.name}, call {number}, {dtypes}: {found}"
                        )
    assert not wrong, "\n".join(wrong)


def test_every_name_of_the_lists_is_a_function() -> None:
    """One that this torch lacks would be left out without a word."""
    named = [*policy.rules(allow_banned=False)]
    assert [rule for rule in named if not callable(getattr(rule.owner, rule.name, None))] == []


BAN = """
amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` It requires \
that the output of the previous function be already a FloatTensor.\x20

Most models have a Sigmoid right before BCELoss. In that case, you can use
    torch.nn.BCEWithLogitsLoss
to combine Sigmoid+BCELoss into a single layer that is compatible with amp.
Another option is to add
    amp.register_float_function(torch, 'sigmoid')
before calling `amp.init()`.
If you _really_ know what you are doing, you can disable this warning by passing \
allow_banned=True to `amp.init()`."""


@in_all_settings
def test_binary_cross_entropy_is_banned_in_low_precision_with_the_old_text(
    policy_of: str, low: torch.dtype, verbose: bool, device: torch.device
) -> None:
    with casts(policy_of, device, dtype=low, verbose=verbose):
        for dtypes in [(low,), (F32, low), (low, F32)]:
            x = Maker(*dtypes, device=policy_of)
            with pytest.raises(NotImplementedError) as error:
                torch.nn.BCELoss()(x(2, 3), x(2, 3))
            assert str(error.value) == BAN
        x = Maker(F32, device=policy_of)
        assert torch.nn.BCELoss()(x(2, 3), x(2, 3)).dtype is F32


# In place operators: the name keeps its tensor, with its dtype and its storage.
IN_PLACE = {
    "__iadd__": lambda x, y: x.__iadd__(y),
    "__imul__": lambda x, y: x.__imul__(y),
    "__isub__": lambda x, y: x.__isub__(y),
    "__itruediv__": lambda x, y: x.__itruediv__(y),
    "__idiv__": lambda x, y: x.__idiv__(y),
    "__ipow__": lambda x, y: x.__ipow__(y),
}


def test_every_in_place_operator_of_the_list_is_tested() -> None:
    assert sorted(IN_PLACE) == sorted(tensor_overrides.IN_PLACE_OPERATORS)


@in_all_settings
@pytest.mark.parametrize("operator", IN_PLACE)
def test_an_in_place_operator_keeps_dtype_and_storage(
    policy_of: str, low: torch.dtype, verbose: bool, device: torch.device, operator: str
) -> None:
    with casts(policy_of, device, dtype=low, verbose=verbose):
        for first, second in [(low, F32), (F32, low), (low, low)]:
            x, y = Maker(first, device=policy_of)(3), Maker(second, device=policy_of)(3)
            assert IN_PLACE[operator](x, y) is x
            assert x.dtype is first
