"""The functions of fp16_utils that old scripts build their own mixed precision from."""

import collections
import copy

import pytest
import torch
from torch import nn

from apex_mp import fp16_utils

OLD_NAMES = [
    "BN_convert_float",
    "network_to_half",
    "prep_param_lists",
    "model_grads_to_master_grads",
    "master_params_to_model_params",
    "tofp16",
    "to_python_float",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "DynamicLossScaler",
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 4)  # The name that FP16Model uses for its own child.
        self.plain_norm = nn.BatchNorm1d(4, affine=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("counts", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.network(x))


def test_a_star_import_has_the_fourteen_old_names() -> None:
    names: dict[str, object] = {}
    exec("from apex_mp.fp16_utils import *", names)
    assert {name for name in names if not name.startswith("__")} == set(OLD_NAMES)


def dtypes_of(network: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in network.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*buffers have no masters")
@pytest.mark.parametrize(
    "convert",
    [
        lambda net: fp16_utils.network_to_half(net)[1],
        lambda net: fp16_utils.convert_network(net, torch.half),
        lambda net: fp16_utils.FP16Model(net).network,
    ],
    ids=["network_to_half", "convert_network", "FP16Model"],
)
def test_affine_batch_norms_stay_in_float32_and_the_rest_becomes_half(convert, device) -> None:
    net = Net().to(device)
    assert convert(net) is net
    assert dtypes_of(net) == {
        "counts": torch.int64,
        "network.weight": torch.float16,
        "network.bias": torch.float16,
        "plain_norm.running_mean": torch.float16,
        "plain_norm.running_var": torch.float16,
        "plain_norm.num_batches_tracked": torch.int64,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
        "norm.running_mean": torch.float32,
        "norm.running_var": torch.float32,
        "norm.num_batches_tracked": torch.int64,
    }


@pytest.mark.filterwarnings("ignore:.*buffers have no masters")
@pytest.mark.parametrize("wrap", [fp16_utils.network_to_half, fp16_utils.FP16Model])
@pytest.mark.parametrize("old_prefix", [False, True], ids=["own keys", "old keys"])
def test_a_wrapped_network_saves_its_own_keys_and_loads_old_ones_too(
    wrap, old_prefix, device
) -> None:
    saved = wrap(Net().to(device))
    state = saved.state_dict()
    assert list(state) == list(Net().state_dict())
    if old_prefix:
        prefix = "network." if wrap is fp16_utils.FP16Model else "1."
        state = {prefix + key: value for key, value in state.items()}
    loaded = wrap(Net().to(device))
    holder = nn.ModuleDict({"inside": loaded})
    holder.load_state_dict({"inside." + key: value for key, value in state.items()}, strict=True)
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_fp16model_casts_floating_inputs_only_wherever_they_are(device) -> None:
    Pair = collections.namedtuple("Pair", ["left", "right"])

    class Echo(nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    single = torch.ones(2, device=device)
    args, kwargs = fp16_utils.FP16Model(Echo())(
        single,
        torch.arange(2, device=device),
        [single, "text"],
        Pair(single, None),
        more={"x": single},
    )
    assert args[0].dtype == args[2][0].dtype == args[3].left.dtype == torch.float16
    assert kwargs["more"]["x"].dtype == torch.float16
    assert args[1].dtype == torch.int64
    assert (args[2][1], args[3].right, type(args[3])) == ("text", None, Pair)


@pytest.mark.parametrize("flat", [False, True], ids=["lists", "flat"])
def test_masters_trained_by_hand_equal_training_in_float32(flat, device) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(device, torch.half)
    model[0].bias.requires_grad_(False)
    model_params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else len(model_params) == 3 and 3)
    reference = [nn.Parameter(param.detach().float()) for param in model_params]
    optimizer, plain = torch.optim.SGD(masters, lr=0.1), torch.optim.SGD(reference, lr=0.1)
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(4, 3).to(device, torch.half)).float().square().mean().backward()
        fp16_utils.model_grads_to_master_grads(model_params, masters, flat_master=flat)
        optimizer.step()
        fp16_utils.master_params_to_model_params(model_params, masters, flat_master=flat)
        for param, expected in zip(model_params, reference, strict=True):
            expected.grad = param.grad.float()
        plain.step()
    for param, expected in zip(model_params, reference, strict=True):
        assert torch.equal(param, expected.half())


def test_a_flat_master_of_mixed_dtypes_is_refused_with_the_old_sentence() -> None:
    model = fp16_utils.network_to_half(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(TypeError, match="mixture of parameters of different types"):
        fp16_utils.prep_param_lists(model, flat_master=True)


def test_lists_of_different_lengths_are_refused_before_anything_is_copied(device) -> None:
    model = nn.Linear(2, 2).to(device, torch.half)
    model_params, masters = fp16_utils.prep_param_lists(model)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        masters[0].fill_(9.0)
    with pytest.raises(ValueError, match="2 model parameters and 1 master"):
        fp16_utils.master_params_to_model_params(model_params, masters[:1])
    assert torch.equal(model.weight, before["weight"])


def test_a_missing_gradient_is_zero_in_a_flat_master(device) -> None:
    model = nn.Linear(2, 2).to(device, torch.half)
    model_params, (flat,) = fp16_utils.prep_param_lists(model, flat_master=True)
    flat.grad.fill_(7.0)
    model.weight.grad = torch.ones_like(model.weight)
    fp16_utils.model_grads_to_master_grads(model_params, [flat], flat_master=True)
    assert flat.grad.tolist() == [1.0] * 4 + [0.0] * 2
