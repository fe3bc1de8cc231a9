"""Mixed precision by hand: networks to half precision, and master parameters in lists."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from apex_mp.core import tensors
from apex_mp.core.tensors import cast_floating
from apex_mp.masters.cast_parameters import warn_of_rounded_buffers
from apex_mp.masters.float32_parts import Float32Part
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.RNN.RNNBackend import RNNCell

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """Cast the input to float16: the first layer of `network_to_half`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the input in float16; integers and bools stay as they are."""
        half: Tensor = cast_floating(input, torch.float16)
        return half


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Convert batch norms back to float32, in place, and return the module.

    Those without affine parameters stay as they are: cuDNN takes half running statistics there, and
    networks of 2019 relied on it.

    Args:
        module: Changed in place, with all modules in it.
    """
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine:
            child.float()
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, gradients and buffers, not those of its children.

    A part named by `apex_mp.keep_fp32` stays in float32.

    Args:
        module: Changed in place.
        dtype: The dtype of its floating tensors afterwards.
    """
    if isinstance(module, Float32Part) and dtype in LOW_PRECISION:
        return
    for param in module.parameters(recurse=False):
        if param.dtype.is_floating_point:
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype.is_floating_point:
            setattr(module, name, buffer.to(dtype))


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network except its affine batch norms, in place, and return it.

    Parts named by `apex_mp.keep_fp32` stay as they are too.

    Args:
        network: Changed in place.
        dtype: The dtype of its floating tensors afterwards.
    """
    cast_network(network, dtype)
    warn_of_rounded_buffers("convert_network", network)
    return network


def cast_network(network: nn.Module, dtype: torch.dtype) -> None:
    """Do what `convert_network` does, without a warning."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, (nn.RNNBase, RNNCell)):
            module.flatten_parameters()


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return the network in float16 with its batch norms in float32, behind a cast of the input.

    The network itself is `result[1]`. `state_dict()` has the network's own keys; dicts of old
    versions, whose keys start with "1.", are loaded too.

    Args:
        network: Changed in place.
    """
    wrapped = nn.Sequential(tofp16(), BN_convert_float(network.half()))
    warn_of_rounded_buffers("network_to_half", network)
    hide_prefix(wrapped, "1.")
    return wrapped


class FP16Model(nn.Module):
    """A network in float16 with its affine batch norms in float32; casts what it is called with.

    `state_dict()` has the network's own keys; dicts of old versions, whose keys start with
    "network.", are loaded too.

    Args:
        network: Converted in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        cast_network(network, torch.half)
        warn_of_rounded_buffers("FP16Model", network)
        self.network = network
        hide_prefix(self, "network.")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the network with floating tensors in float16, in lists, tuples and dicts too."""
        return self.network(
            *cast_floating(inputs, torch.float16), **cast_floating(kwargs, torch.float16)
        )


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Parameter], list[Parameter]]:
    """Return the parameters of a model that require grad, and float32 masters of them.

    Args:
        model: The model, already in the precision it is to compute in.
        flat_master: Make one master, a vector, for all parameters [False].

    Raises:
        TypeError: `flat_master` is set and the parameters are of several dtypes; or a parameter
            cannot have a float32 master.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    model_params = [*named.values()]
    tensors.check_params("prep_param_lists", 0, model_params, tensors.not_readable, [*named])
    if not flat_master:
        masters = [Parameter(param.detach().clone().float()) for param in model_params]
        return model_params, masters
    if len({param.dtype for param in model_params}) > 1:
        raise TypeError(
            "Error in prep_param_lists:  model may contain a mixture of parameters of different "
            "types.  Use flat_master=False, or use F16_Optimizer."
        )
    flat = Parameter(torch.cat([param.detach().reshape(-1).float() for param in model_params]))
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[Parameter],
    master_params: Sequence[Parameter],
    flat_master: bool = False,
) -> None:
    """Copy gradients from the model to the masters, overwriting theirs.

    Args:
        model_params: From `prep_param_lists`.
        master_params: From `prep_param_lists`. A master's gradient becomes None where the model's
            is; in a flat master it becomes zero there.
        flat_master: As for `prep_param_lists` [False].
    """
    _check_lists("model_grads_to_master_grads", model_params, master_params, flat_master)
    if flat_master:
        flat = master_params[0]
        if flat.grad is None:
            flat.grad = torch.zeros_like(flat)
        for param, place in zip(model_params, _places(flat.grad, model_params), strict=True):
            place.zero_() if param.grad is None else place.copy_(param.grad.detach())
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.detach().copy_(param.grad.detach())


def master_params_to_model_params(
    model_params: Sequence[Parameter],
    master_params: Sequence[Parameter],
    flat_master: bool = False,
) -> None:
    """Copy masters, rounded, to the model.

    Args:
        model_params: From `prep_param_lists`.
        master_params: From `prep_param_lists`.
        flat_master: As for `prep_param_lists` [False].
    """
    _check_lists("master_params_to_model_params", model_params, master_params, flat_master)
    with torch.no_grad():
        sources = _places(master_params[0], model_params) if flat_master else master_params
        for param, source in zip(model_params, sources, strict=True):
            param.copy_(source)


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor of one element, or the first of a sequence.

    Args:
        t: A tensor of one element, or a sequence.
    """
    return t.item() if hasattr(t, "item") else t[0]


def _check_lists(
    name: str, model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool
) -> None:
    wish = 1 if flat_master else len(model_params)
    if len(master_params) != wish:
        raise ValueError(
            f"{name}: there are {len(model_params)} model parameters and {len(master_params)} "
            f"master parameters; with flat_master={flat_master} there must be {wish} masters"
        )
    masters = sum(master.numel() for master in master_params)
    models = sum(param.numel() for param in model_params)
    if masters != models:
        raise ValueError(
            f"{name}: the model has {models} elements, the masters have {masters}; they must match"
        )


def _places(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return views into a vector, one for each parameter, in its shape."""
    parts = torch.split(flat.detach(), [param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def hide_prefix(wrapper: nn.Module, hidden: str) -> None:
    """Give a wrapper's state_dict the keys of the module in it; it loads both kinds of keys."""
    # Not closures: those could not be pickled with the wrapper.
    save, load = functools.partial(_hide, hidden), functools.partial(_unhide, hidden)
    wrapper.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]


def _hide(hidden: str, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + hidden)]:
        state[prefix + key[len(prefix + hidden) :]] = state.pop(key)


def _unhide(hidden: str, wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = wrapper.get_submodule(hidden.rstrip("."))
    own: Mapping[str, Any] = inner.state_dict()
    # Only keys of the wrapped module: it may have a child whose name is the prefix.
    for key in [key for key in state if key.startswith(prefix) and key[len(prefix) :] in own]:
        state[prefix + hidden + key[len(prefix) :]] = state.pop(key)
