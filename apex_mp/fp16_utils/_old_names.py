"""Old names of an FP16_Optimizer's parts, which subclasses of 2019 read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.fp16_utils._given_scale import is_true, scaler_of
from apex_mp.fp16_utils._parts import Parts
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from apex_mp.loss_scale import StaticLossScale


def _of_dynamic(name: str, doc: str) -> Any:
    """Return a property that is an attribute of the dynamic loss scaler."""

    def get(self: OldScale) -> Any:
        return getattr(self._dynamic(name), name)

    def put(self: OldScale, value: Any) -> None:
        setattr(self._dynamic(name), name, value)

    return property(get, put, doc=doc)


class OldScale(Parts):
    """Properties over `loss_scaler`."""

    @property
    def loss_scaler(self) -> LossScaler | DynamicLossScaler:
        """The loss scaler; may be set. On a GPU the host waits until it is up to date.

        A kept reference goes out of date: read this property again.
        """
        self._misuse.note_scale_is_known()
        return self._scaler_now()

    @loss_scaler.setter
    def loss_scaler(self, value: Any) -> None:
        self._misuse.note_scale_is_known()
        self._set_scaler(scaler_of(value) or value)

    def _scaler_now(self) -> LossScaler | DynamicLossScaler:
        """Return the up-to-date loss scaler; does not count as a read by the user."""
        self._device_scale.catch_up(self._loss_scaler)
        return self._loss_scaler

    def _set_scaler(self, value: LossScaler | DynamicLossScaler) -> None:
        # Outcomes of earlier steps are for the old one.
        self._device_scale.catch_up(self._loss_scaler)
        self._loss_scaler = value

    @property
    def loss_scale(self) -> float:
        """The factor on the loss; may be set."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        scaler = self.loss_scaler
        scaler.cur_scale = StaticLossScale(value).scale  # Refuses what is no scale.
        self._device_scale.write_through(scaler)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic; may be set."""
        return isinstance(self._loss_scaler, DynamicLossScaler)

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, value: Any) -> None:
        scaler = scaler_of(value)
        if scaler is not None:
            self.loss_scaler = scaler
        elif (dynamic := is_true("dynamic_loss_scale", value)) != self.dynamic_loss_scale:
            self.loss_scaler = self._new_loss_scaler(dynamic, self.loss_scale)

    def _new_loss_scaler(self, dynamic: bool, scale: float) -> LossScaler | DynamicLossScaler:
        if not dynamic:
            return LossScaler(scale)
        return DynamicLossScaler(**{**self._dynamic_args, "init_scale": scale})

    @property
    def cur_iter(self) -> int:
        """Steps until now, skipped ones included; may be set."""
        scaler = self._scaler_now()
        return scaler.cur_iter if isinstance(scaler, DynamicLossScaler) else self._iteration

    @cur_iter.setter
    def cur_iter(self, value: int) -> None:
        scaler = self._scaler_now()
        self._iteration = value
        if isinstance(scaler, DynamicLossScaler):
            scaler.cur_iter = value

    last_overflow_iter = _of_dynamic(
        "last_overflow_iter",
        "The last skipped step; may be set. Only with a dynamic loss scale, like the next two.",
    )
    scale_factor = _of_dynamic(
        "scale_factor", "Growth multiplies the loss scale by this, backing off divides; may be set."
    )
    scale_window = _of_dynamic(
        "scale_window", "Steps without overflow before the loss scale grows; may be set."
    )

    def _dynamic(self, name: str) -> DynamicLossScaler:
        scaler = self._scaler_now()
        if not isinstance(scaler, DynamicLossScaler):
            raise AttributeError(f"FP16_Optimizer has {name} only if dynamic_loss_scale is True")
        return scaler


class OldNames(OldScale):
    """Properties over the masters."""

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The model's low-precision parameters, by group."""
        return [group.model_params for group in self._masters.groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Parameter]]:
        """The masters of the low-precision parameters, by group."""
        return [group.master_params for group in self._masters.groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Parameter]]:
        """The parameters of float32 and float64, by group."""
        return [group.fp32_params for group in self._masters.groups]

    @property
    def all_fp16_params(self) -> list[Parameter]:
        """The model's low-precision parameters."""
        return self._masters.model_params()

    @property
    def all_fp32_from_fp16_params(self) -> list[Parameter]:
        """The masters of the low-precision parameters."""
        return self._masters.master_params()

    @property
    def all_fp32_from_fp32_params(self) -> list[Parameter]:
        """The parameters of float32 and float64."""
        return self._masters.fp32_params()

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """Each group's masters as one vector; what is written to it counts in the next step."""
        return [group.flat for group in self._masters.groups]

    @property
    def fp16_groups_flat(self) -> list[Tensor]:
        """A copy of each group's low-precision parameters as one vector."""
        return [
            torch.cat([param.detach().reshape(-1) for param in group.model_params])
            if group.model_params
            else torch.empty(0, dtype=torch.float16)
            for group in self._masters.groups
        ]
