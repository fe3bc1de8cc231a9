"""FusedMixedPrecisionLamb: FusedLAMB with masters, learning rate and step count on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.masters.layout import Rule
from apex_mp.optimizers.fused_lamb import FusedLAMB
from apex_mp.step.scaled_step import drop_amp_tensors


class _Rule(Rule):
    def note_new(self, state: dict[str, Any], before: Any, group: Mapping[str, Any]) -> None:
        if "step" not in (before or {}):
            state["step"].copy_(group["step"].view(()))


class FusedMixedPrecisionLamb(FusedLAMB):
    """FusedLAMB for torch's GradScaler, under the name and with the arguments of 2021.

        params = model.parameters()
        optimizer = FusedMixedPrecisionLamb(params, lr=6e-3, reduced_precision_dtype=torch.float16)

    In each group `lr` is a float32 tensor and `step` an int32 tensor of one element, both on the
    device of the group's first parameter, so that the host waits for no GPU. A skipped step does
    not count. Checkpoints of apex load; those from here have masters, too.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate [1e-3].
        step: The steps before the first one [0].
        bias_correction: As of `FusedLAMB`; likewise the others [True].
        betas: As there [(0.9, 0.999)].
        eps: As there [1e-6].
        weight_decay: As there [0.01].
        amsgrad: Not supported [False].
        adam_w_mode: As there [True].
        grad_averaging: As there [True].
        max_grad_norm: As there [1.0].
        use_nvlamb: As there [False].
        reduced_precision_dtype: torch.float16 or torch.bfloat16: parameters in 16 bits have
            masters [None: none has].

    Raises:
        RuntimeError, TypeError, ValueError: As `FusedLAMB`.
    """

    _public_name = "FusedMixedPrecisionLamb"
    _rule = _Rule("lamb", FusedLAMB._rule.layout, clips_by_global_norm=True, steps_parts=False)
    _pickled = (*FusedLAMB._pickled, "_reduced")
    _first_step = 0
    _asks_for_masters = "reduced_precision_dtype=param.dtype"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self._first_step = step
        options = (bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging)
        super().__init__(
            params,
            lr,
            *options,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.reduced_precision_dtype = reduced_precision_dtype

    @property
    def reduced_precision_dtype(self) -> torch.dtype | None:
        """The dtype of parameters that have masters; it may be set before the first step."""
        return self._reduced

    @reduced_precision_dtype.setter
    def reduced_precision_dtype(self, value: torch.dtype | None) -> None:
        if value not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"FusedMixedPrecisionLamb: reduced_precision_dtype is {value}; it must be "
                "torch.float16, torch.bfloat16 or None"
            )
        self._reduced: torch.dtype | None = value
        for group in (self.defaults, *self.param_groups):
            group["master_weights"] = value is not None

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """Copies of the masters, None for parameters that have none."""
        dtype = self.reduced_precision_dtype
        return [
            {"params": [self.master(p) if p.dtype == dtype else None for p in group["params"]]}
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `FusedLAMB.add_param_group`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step", self._first_step)
        self._put_on_device(group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this optimizer, of FusedLAMB or of apex; see there."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("step", self._first_step)
            self._put_on_device(group)
        self._count()

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss again and returns it [None].
            *args: As of `FusedLAMB.step`.
            **kwargs: Likewise; or `grad_scaler`, a torch.amp.GradScaler whose `step` is not used.

        Returns:
            What `closure` returned, or None.
        """
        scaler = kwargs.pop("grad_scaler", None)
        if scaler is not None:  # Not an argument by its name: torch's scaler would warn of it.
            device = self.param_groups[0]["params"][0].device
            self.found_inf = scaler._check_inf_per_device(self)[device]
            self.grad_scale = scaler._get_scale_async()
        try:
            loss = super().step(closure, *args, **kwargs)
        finally:
            if scaler is not None:
                drop_amp_tensors(self)
        self._count()
        return loss

    step.takes_scaled_step = True  # type: ignore[attr-defined]

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        step = {name: value for name, value in group.items() if name == "step"}
        super()._adapt_group(number, group, states)
        group.update(step)

    def _put_on_device(self, group: dict[str, Any]) -> None:
        device = next((param.device for param in group["params"]), None)
        for name, dtype in (("lr", torch.float32), ("step", torch.int32)):
            value = torch.as_tensor(group[name]).detach()
            group[name] = value.to(device, dtype, copy=True).view(-1 if name == "step" else ())

    def _count(self) -> None:
        """Write the steps that were not skipped to the groups; the host does not wait."""
        for group in self.param_groups:
            states = (self.state.get(param) for param in group["params"])
            state = next((each for each in states if each), None)
            if state is not None:
                group["step"].copy_(state["step"].view(-1))
