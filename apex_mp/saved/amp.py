"""What amp saves: loss scales, and the values of masters in a model's state_dict."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch.nn import Parameter

from apex_mp.core.state_checks import as_dict
from apex_mp.core.tensors import params_of
from apex_mp.loss_scale import is_of_grad_scaler
from apex_mp.masters.joined import joined
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.scale.amp_scaler import LossScaler


def saved_scales(
    scalers: Sequence[LossScaler], destination: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of loss scales, by "loss_scaler0" and so on."""
    result = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(scalers):
        result[f"loss_scaler{number}"] = scaler.state_dict()
    return result


def load_scales(
    scalers: Sequence[LossScaler], state_dict: Any, report: Callable[[str], None]
) -> None:
    """Load what `saved_scales` returned, here or in 2019, or the state of a GradScaler.

    `report` is called with a sentence if their number differs.
    """
    state_dict = as_dict("amp", state_dict)
    if is_of_grad_scaler(state_dict):
        state_dict = {f"loss_scaler{number}": state_dict for number in range(len(scalers))}
    unexpected = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. "
        )
    if len(state_dict) != len(scalers):
        report(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} "
            "loss_scalers are used"
        )
    before = [scaler.value for scaler in scalers]
    try:
        for number, scaler in enumerate(scalers):
            if f"loss_scaler{number}" in state_dict:
                scaler.load_state_dict(state_dict[f"loss_scaler{number}"])
    except BaseException:
        for scaler, value in zip(scalers, before, strict=True):
            scaler.value = value
        raise


# By parameter of the model. Optimizers with a parameter in common have one master of it.
Masters: TypeAlias = dict[Parameter, Parameter]


class MasterState:
    """Saves and loads masters' values with the modules of a low-precision model.

    Args:
        masters: The master of each parameter of the model. None: this belongs to a copy of the
            model, which has no masters unless its optimizer is copied with it.
    """

    _attached: ClassVar[weakref.WeakSet[MasterState]] = weakref.WeakSet()

    def __init__(self, masters: Masters | None = None) -> None:
        self.masters = masters
        self._models: list[weakref.ref[torch.nn.Module]] = []

    @classmethod
    def known(cls, optimizer: torch.optim.Optimizer) -> MasterState | None:
        """Return the state of the first model that has a parameter of the optimizer, or None."""
        stepped = {*map(id, params_of(optimizer))}
        for each in cls._attached:
            models = [model for model in (ref() for ref in each._models) if model is not None]
            if any(id(param) in stepped for model in models for param in model.parameters()):
                return each
        return None

    def __reduce__(self) -> Any:
        return MasterState, (None,)

    @classmethod
    def has(cls, model: torch.nn.Module) -> bool:
        """Return whether a model has been attached before."""
        return any(ref() is model for each in cls._attached for ref in each._models)

    def attach(self, model: torch.nn.Module) -> None:
        """Make a model and each of its submodules save and load masters' values."""
        self._models.append(weakref.ref(model))
        self._attached.add(self)
        for module in model.modules():
            # torch sets an attribute on a hook, which a bound method does not allow.
            save, load = functools.partial(self.save), functools.partial(self.load)
            module.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]

    def save(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put float32 values in place of a module's own in low precision.

        Weights that others have written since the last step are saved as they are.
        """
        if self.masters is None:
            return
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dtype in LOW_PRECISION and prefix + name in state:
                master = self.masters.get(tensor)  # type: ignore[call-overload]
                state[prefix + name] = tensor.float() if master is None else joined(tensor, master)

    def load(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Write what a module is about to load to its masters, before it is rounded."""
        if self.masters is None:
            return
        if metadata.get("assign_to_params_buffers") and any(
            param in self.masters for param in module.parameters()
        ):
            raise RuntimeError(
                "load_state_dict: assign is True, which puts new parameters into the model, and "
                "the optimizer has float32 masters of the old ones; load with assign=False"
            )
        for name, param in module._parameters.items():
            master = None if param is None else self.masters.get(param)
            value = state.get(prefix + name)
            # load_state_dict refuses what does not fit.
            if master is not None and torch.is_tensor(value) and value.shape == master.shape:
                with torch.no_grad():
                    master.copy_(value)
