"""Convert checkpoints between precisions: float32 into fp16 models, and masters to float32."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex_mp import fp16_utils
from apex_mp.core.state_checks import file_advice
from apex_mp.core.tensors import params_of
from apex_mp.masters.joined import joined
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.masters.store import MasterStore, has_master
from apex_mp.saved.rename import renamed


def check_state(function: str, state_dict: Any) -> None:
    """Check that `state_dict` is one of a model, not a file's name, a model or a whole checkpoint.

    Raises:
        TypeError: It is no mapping by names.
        ValueError: It holds no tensor, but a mapping that does.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise TypeError(
            f"{function}: state_dict is a {type(state_dict).__name__}{_advice(state_dict)}; it "
            "must be what a model's state_dict() returns"
        )
    if any(torch.is_tensor(value) for value in state_dict.values()):
        return
    inner = [
        key
        for key, value in state_dict.items()
        if isinstance(value, Mapping) and any(map(torch.is_tensor, value.values()))
    ]
    if inner:
        raise ValueError(
            f"{function}: state_dict is a whole checkpoint, of {[*state_dict]}; give the part that "
            f"is the model's, such as checkpoint[{inner[0]!r}]"
        )


def _advice(state_dict: Any) -> str:
    return ", not a dict by names" if isinstance(state_dict, Mapping) else file_advice(state_dict)


def check_model(function: str, model: Any) -> None:
    """Check that `model` is a module.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function}: model is a {type(model).__name__}; it must be a torch.nn.Module"
        )


def check_optimizer(function: str, optimizer: Any) -> None:
    """Check that `optimizer` is an optimizer.

    Raises:
        TypeError: It is not.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise TypeError(
            f"{function}: optimizer is a {type(optimizer).__name__}; it must be an optimizer or a "
            "list of them"
        )


def check_keys(state: Mapping[str, Any], model: nn.Module) -> None:
    """Check that the keys are those of the model.

    Raises:
        ValueError: Keys are missing or unknown.
    """
    wanted = model.state_dict()
    missing = [
        key for key in wanted if key not in state and not key.endswith("num_batches_tracked")
    ]
    unexpected = [key for key in state if key not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"convert: the state_dict lacks {missing} and has {unexpected}, which the model has "
            "not; they must fit"
        )


def check_value(name: str, value: Any, tensor: Tensor) -> None:
    """Check that a value fits into the model's tensor.

    Raises:
        ValueError: It is no tensor, of another shape, or too large for float16.
    """
    if not torch.is_tensor(value):
        raise ValueError(
            f"convert: {name} is a {type(value).__name__}; it must be a tensor, as in the model"
        )
    if value.shape != tensor.shape:
        raise ValueError(
            f"convert: {name} has shape {[*value.shape]}, the model's has {[*tensor.shape]}; they "
            "must match"
        )
    if tensor.dtype == torch.float16 and value.is_floating_point():
        lost = torch.isinf(value.to(tensor.dtype)) & ~torch.isinf(value)
        if bool(lost.any()):
            largest = value[lost].abs().max().item()
            raise ValueError(f"convert: {name} holds {largest:g}, which float16 cannot hold")


__all__ = ["load", "masters", "rename", "to_float32", "to_mixed"]

_Report: TypeAlias = Callable[[str], Any] | None

_STATISTICS = ("running_mean", "running_var")


def rename(state_dict: Mapping[str, Any], model: nn.Module) -> OrderedDict[str, Any]:
    """Return a state_dict with the keys of a model.

    Prefixes of wrappers are removed from all keys or added to all: "module." (DataParallel,
    DistributedDataParallel), "network." (FP16Model), "1." (network_to_half), "0." (a Sequential),
    or several of them. Tensors are not copied.

    Args:
        state_dict: The state_dict of the model, wrapped or not.
        model: The model whose `state_dict()` has the wanted keys.

    Raises:
        TypeError: `state_dict` is no mapping by names, or `model` no module.
        ValueError: No prefix makes the keys fit, or several do and mean different things; or
            `state_dict` is a whole checkpoint.
    """
    return _renamed("convert.rename", state_dict, model)


def load(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    optimizer: Any = None,
    *,
    report: _Report = None,
) -> None:
    """Load a checkpoint of any precision into a model, and without rounding into its masters.

    The model's tensors keep their dtypes: a float32 value is rounded for a float16 weight, while
    batch norms in float32 stay exact. Keys are renamed as by `rename`.

    Args:
        model: In mixed precision or not; wrapped, or not.
        state_dict: A model's, for example of a float32 run.
        optimizer: The optimizer of the model, or a list. An FP16_Optimizer that exists already must
            be given: its next step would write masters of the old weights to the model. It is not
            needed after `amp.initialize` [None].
        report: Called with one line for each tensor, "name from dtype to dtype", for example
            `print` [None].

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Keys or shapes do not fit, a value is too large for the model's dtype, or an
            optimizer steps no parameter of the model. Nothing is changed by an error.
    """
    state = _renamed("convert.load", state_dict, model)
    tensors = _tensors(model)
    check_keys(state, model)
    master_of = _masters_of("convert.load", model, optimizer)
    for name, value in state.items():
        if name in tensors:
            tensor = tensors[name][1]
            check_value(name, value, tensor)
            _add_to_report(report, name, value.dtype, tensor.dtype)
    model.load_state_dict(state)
    with torch.no_grad():
        for name, (_, tensor) in tensors.items():
            if id(tensor) in master_of and name in state:
                master_of[id(tensor)].open().copy_(state[name])


def to_mixed(
    state_dict: Mapping[str, Any], model: nn.Module, *, report: _Report = None
) -> OrderedDict[str, Any]:
    """Return a state_dict in a model's dtypes, for a smaller file.

    Masters that are loaded from it are rounded; give `load` the float32 state_dict instead.

    Args:
        state_dict: A model's, for example of a float32 run.
        model: In mixed precision.
        report: As for `load` [None].

    Raises:
        TypeError: `state_dict` is no mapping by names, or `model` no module.
        ValueError: Keys or shapes do not fit, or a value is too large for the model's dtype.
    """
    state, tensors = _renamed("convert.to_mixed", state_dict, model), _tensors(model)
    check_keys(state, model)
    for name, value in state.items():
        if name not in tensors:
            continue
        module, tensor = tensors[name]
        check_value(name, value, tensor)
        dtype = tensor.dtype if tensor.is_floating_point() else value.dtype
        if isinstance(module, _BatchNorm) and name.endswith(_STATISTICS):
            dtype = torch.float32
        state[name] = value.detach().to(dtype)
        _add_to_report(report, name, value.dtype, dtype)
    return state


def to_float32(state_dict: Mapping[str, Any], *, report: _Report = None) -> OrderedDict[str, Any]:
    """Return a state_dict with float16 and bfloat16 tensors converted to float32.

    Rounding is not undone; `masters` returns the unrounded weights that an optimizer keeps.

    Args:
        state_dict: A model's.
        report: As for `load` [None].

    Raises:
        TypeError: `state_dict` is no mapping by names.
        ValueError: It is a whole checkpoint.
    """
    check_state("convert.to_float32", state_dict)
    state = _copied(state_dict)
    for name, value in state.items():
        if torch.is_tensor(value):
            state[name] = _widened(value)
            _add_to_report(report, name, value.dtype, state[name].dtype)
    return state


def masters(model: nn.Module, optimizer: Any, *, report: _Report = None) -> OrderedDict[str, Any]:
    """Return a model's state_dict in float32, with masters in place of rounded weights.

    A float32 model can load it: its keys are those of the network without wrappers. Tensors are
    copies.

    Args:
        model: In mixed precision; wrapped, or not.
        optimizer: Its optimizer, or a list: an FP16_Optimizer, one that went through
            `amp.initialize`, or a fused optimizer with `master_weights=True`.
        report: As for `load`; the first dtype is that of the model's own tensor [None].

    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer.
        ValueError: A low-precision parameter that requires grad has no master there, or an
            optimizer steps no parameter of the model.
    """
    check_model("convert.masters", model)
    network = _without_wrappers(model)
    master_of = current_masters("convert.masters", network, optimizer)
    state = _copied(network.state_dict())
    tensors = _tensors(network)
    lost = [
        name
        for name, (_, tensor) in tensors.items()
        if tensor.dtype in LOW_PRECISION and tensor.requires_grad and id(tensor) not in master_of
    ]
    if lost:
        raise ValueError(
            f"convert.masters: {lost[0]} is in {tensors[lost[0]][1].dtype} and has no master in "
            "this optimizer; give the optimizer that steps the model"
        )
    for name, value in state.items():
        if not torch.is_tensor(value):
            continue
        tensor = tensors[name][1] if name in tensors else value
        state[name] = _widened(master_of.get(id(tensor), value).detach()).clone()
        _add_to_report(report, name, tensor.dtype, state[name].dtype)
    return state


def _copied(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of the dict with the same tensors and torch's `_metadata`."""
    copied = OrderedDict(state_dict)
    vars(copied).update(vars(state_dict) if isinstance(state_dict, OrderedDict) else {})
    return copied


def _renamed(function: str, state_dict: Any, model: Any) -> OrderedDict[str, Any]:
    check_model(function, model)
    check_state(function, state_dict)
    return renamed(state_dict, [*model.state_dict()])


def _masters_of(function: str, model: nn.Module, optimizer: Any) -> dict[int, _Master]:
    """Return how to read and write the masters of a model, by id() of its parameters."""
    if optimizer is None:
        return {}
    found: dict[int, _Master] = {}
    of_model = {id(param) for param in model.parameters()}
    for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        check_optimizer(function, one)
        if isinstance(one, fp16_utils.FP16_Optimizer):
            model_of = one._masters.model_of
        else:
            model_of = getattr(one, "_amp_model_of", {})
        stepped = params_of(one)
        if of_model.isdisjoint(map(id, [*stepped, *model_of.values()])):
            raise ValueError(
                f"{function}: the optimizer, a {type(one).__name__}, steps no parameter of this "
                "model; give the one that does, and FP16_Optimizer itself, not the one inside it"
            )
        for master, param in model_of.items():
            read = functools.partial(joined, param, master)
            found[id(param)] = _Master(read, functools.partial(_itself, master))
        store: MasterStore | None = getattr(one, "_own_masters", None)
        for group in one.param_groups:
            for param in group["params"]:
                if (
                    store is not None
                    and param.dtype in LOW_PRECISION
                    and has_master(param, group, one)
                ):
                    read = functools.partial(store.whole_of, param)
                    found[id(param)] = _Master(read, functools.partial(store.opened, param))
    return found


class _Master(NamedTuple):
    """A master: `read` returns a copy, `open` itself, which counts when it is written."""

    read: Callable[[], Tensor]
    open: Callable[[], Tensor]


def _itself(master: Tensor) -> Tensor:
    return master


def current_masters(function: str, model: nn.Module, optimizer: Any) -> dict[int, Tensor]:
    """Return masters by id() of the model's parameters; where these were written, their numbers.

    Args:
        function: The caller, for messages.
        model: The model.
        optimizer: Its optimizer, or a list.

    Raises:
        TypeError, ValueError: As `masters`.
    """
    masters = _masters_of(function, model, optimizer)
    return {
        id(param): masters[id(param)].read() for param in model.parameters() if id(param) in masters
    }


def _without_wrappers(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif (hidden := _hidden_child(model)) is not None:
            model = getattr(model, hidden)
        else:
            return model


def _hidden_child(module: nn.Module) -> str | None:
    """Return the child whose name a wrapper of ours leaves out of its keys, or None."""
    if isinstance(module, fp16_utils.FP16Model):
        return "network"
    of_two = isinstance(module, nn.Sequential) and len(module) == 2
    return "1" if of_two and isinstance(module[0], fp16_utils.tofp16) else None  # type: ignore[index]


def _tensors(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the model's own tensors by their keys in its state_dict, each with its module."""
    keys = {*model.state_dict()}
    found: dict[str, tuple[nn.Module, Tensor]] = {}
    for prefix, module in _walk(model, ""):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and prefix + name in keys:
                found[prefix + name] = module, tensor
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    hidden = _hidden_child(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if name == hidden else f"{prefix}{name}.")


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in LOW_PRECISION else value


def _add_to_report(report: _Report, name: str, before: torch.dtype, after: torch.dtype) -> None:
    if report is not None:
        report(f"{name} from {_short(before)} to {_short(after)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
