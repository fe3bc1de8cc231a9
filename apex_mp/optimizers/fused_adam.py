"""FusedAdam: Adam and AdamW as one operator call per parameter group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _ops
from apex_mp import grads as _grads

_Lists: TypeAlias = list[list[Tensor | None]]


@dataclasses.dataclass
class _Batch:
    """The lists of one operator call: tensors of one device, all with a copy or all without."""

    params: list[Tensor] = dataclasses.field(default_factory=list)
    grads: list[Tensor] = dataclasses.field(default_factory=list)
    exp_avgs: list[Tensor] = dataclasses.field(default_factory=list)
    exp_avg_sqs: list[Tensor] = dataclasses.field(default_factory=list)
    steps: list[Tensor] = dataclasses.field(default_factory=list)
    copies: list[Tensor] = dataclasses.field(default_factory=list)


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019), one fused pass over all tensors.

    Equals `torch.optim.AdamW` (`adam_w_mode=True`) and `torch.optim.Adam` (False) within rounding,
    and its `state_dict` can be loaded by them and the other way round. Parameters may be float16,
    bfloat16, float32 or float64 on CPU or CUDA; gradients of any of these dtypes. Moments and math
    are float32, for float64 parameters float64. Inside `torch.amp.GradScaler` the unscaling is part
    of the same pass, and float16 gradients are welcome, as long as nobody calls `scaler.unscale_`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element [1e-3].
        bias_correction: Correct the moments' start at zero [True].
        betas: Decay of the first and second moment, each in [0, 1) [(0.9, 0.999)].
        eps: Added to the denominator, not negative [1e-8].
        eps_inside_sqrt: Add eps under the square root instead of outside [False].
        weight_decay: Decay factor, not negative [0].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        amsgrad: Not supported; there for its place in the signature [False].
        adam_w_mode: Decay the weights themselves (AdamW) instead of adding L2 to the gradient [True].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does today [False].
        capturable: No effect: the CUDA kernels read step counts on the device anyway [False].
        master_weights: Keep a float32 master of each float16 and bfloat16 parameter in
            `state[p]["master_param"]`, step it, and write the parameter in the same pass [False].
        maximize: Maximise the objective instead of minimising it [False].

    Raises:
        RuntimeError: `amsgrad` is asked for.
        ValueError: A hyperparameter is out of range.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to step(): it sets self.grad_scale and
    # self.found_inf around the call.
    _step_supports_amp_scaling = True
    # FP16_Optimizer need not copy masters to the model after step(output_params=...).
    _writes_output_params = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        set_grad_none: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "adam_w_mode": adam_w_mode,
            "eps_inside_sqrt": eps_inside_sqrt,
            "master_weights": master_weights,
        }
        _check_hyperparameters(defaults)
        super().__init__(params, defaults)

    @property
    def eps_mode(self) -> int:
        """0 if eps is added inside the square root, else 1: the old name."""
        return 0 if self.defaults["eps_inside_sqrt"] else 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks are the constructor's.

        Raises:
            RuntimeError: `amsgrad` is asked for.
            ValueError: A hyperparameter is out of range.
        """
        _check_hyperparameters(self.defaults | param_group)
        super().add_param_group(param_group)

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | None = None,
        output_params: Iterable[Any] | None = None,
        scale: float | Tensor = 1.0,
        grad_norms: Iterable[float | Tensor] | None = None,
    ) -> Any:
        """Take one step with every parameter that has a gradient.

        Without arguments the gradients are each parameter's `.grad`. The other forms are the legacy
        call of `FP16_Optimizer`.

        Args:
            closure: Computes the loss again and returns it.
            grads: Gradients instead of `.grad`: a list for each group, or one flat list or generator
                over all parameters; None where there is none.
            output_params: Where each new parameter is also written in the output's dtype (fp16
                model parameters, if `params` are their fp32 masters): as `grads`.
            scale: The gradients are divided by it: the loss scale.
            grad_norms: l2 norm of each group's gradients as given, that is, of the scaled ones; saves
                the pass that `max_grad_norm` otherwise costs.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: A gradient is sparse, or does not fit its parameter.
            ValueError: `grads`, `output_params` or `grad_norms` do not fit the groups.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            grad_lists = self._per_group("grads", grads)
            output_lists = self._per_group("output_params", output_params)
            norms = self._norm_per_group(grad_norms)
            found_inf: Tensor | None = getattr(self, "found_inf", None)
            grad_scale: Tensor | None = getattr(self, "grad_scale", None)
            if grad_scale is not None:
                scale = scale * grad_scale
            for index, group in enumerate(self.param_groups):
                group_grads: list[Tensor | None] = (
                    [p.grad for p in group["params"]] if grad_lists is None else grad_lists[index]
                )
                outputs = None if output_lists is None else output_lists[index]
                self._step_group(group, group_grads, outputs, scale, norms[index], found_inf)
        return loss

    def _step_group(
        self,
        group: dict[str, Any],
        grads: list[Tensor | None],
        outputs: list[Tensor | None] | None,
        scale: float | Tensor,
        norm: float | Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        batches: dict[tuple[torch.device, bool], _Batch] = {}
        for index, (param, grad) in enumerate(zip(group["params"], grads, strict=True)):
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(
                    "FusedAdam does not support sparse gradients, please consider SparseAdam instead"
                )
            target, copy = self._target(param, group, outputs[index] if outputs else None)
            batch = batches.setdefault((param.device, copy is not None), _Batch())
            state = self.state[param]
            batch.params.append(target)
            batch.grads.append(_grads.lie_as(grad, target))
            batch.exp_avgs.append(state["exp_avg"])
            batch.exp_avg_sqs.append(state["exp_avg_sq"])
            batch.steps.append(state["step"])
            if copy is not None:
                batch.copies.append(copy)
        inv_scale = _inverse(scale, norm, group, [b.grads for b in batches.values()])
        beta1, beta2 = group["betas"]
        for (device, has_copies), batch in batches.items():
            _ops.adam_(
                batch.params,
                batch.grads,
                batch.exp_avgs,
                batch.exp_avg_sqs,
                batch.steps,
                batch.copies if has_copies else None,
                lr=_number_on(group["lr"], device),
                inv_scale=_number_on(inv_scale, device),
                found_inf=None if found_inf is None else found_inf.to(device),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                adam_w_mode=group["adam_w_mode"],
                bias_correction=group["bias_correction"],
                eps_inside_sqrt=group["eps_inside_sqrt"],
            )

    def _target(
        self, param: Tensor, group: dict[str, Any], output: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The tensor to step and the one to copy it to; makes the state on first sight."""
        state = self.state[param]
        if "exp_avg" not in state:
            dtype = _moment_dtype(param)
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        if not (group["master_weights"] and param.dtype in (torch.float16, torch.bfloat16)):
            return param, None if output is param else output
        if output is not None:
            raise ValueError(
                "FusedAdam.step: output_params was given with master_weights=True; "
                "give one of the two, each parameter has one low-precision copy"
            )
        if "master_param" not in state:
            state["master_param"] = param.detach().float()
        return state["master_param"], param

    def _per_group(self, name: str, given: Iterable[Any] | None) -> _Lists | None:
        """A list for each group, of the three forms that the legacy call has."""
        if given is None:
            return None
        items = list(given)
        sizes = [len(group["params"]) for group in self.param_groups]
        nested = bool(items) and all(isinstance(item, (list, tuple)) for item in items)
        if nested:
            lists = [list(item) for item in items]
        elif len(items) == sum(sizes):
            rest = iter(items)
            lists = [[next(rest) for _ in range(size)] for size in sizes]
        else:
            lists = [items]
        if [len(one) for one in lists] != sizes:
            raise ValueError(
                f"FusedAdam.step: {name} has lists of {[len(one) for one in lists]} tensors, "
                f"the parameter groups have {sizes}; they must match"
            )
        return lists

    def _norm_per_group(
        self, grad_norms: Iterable[float | Tensor] | None
    ) -> list[float | Tensor] | list[None]:
        if grad_norms is None:
            return [None] * len(self.param_groups)
        norms = list(grad_norms)
        if len(norms) != len(self.param_groups):
            raise ValueError(
                f"FusedAdam.step: grad_norms has {len(norms)} numbers; it must have one for each of "
                f"the {len(self.param_groups)} parameter groups"
            )
        return norms

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load the state of a FusedAdam, or of a torch.optim.Adam or AdamW.

        Options that the saved groups lack stay as they are here. Moments become float32 (float64 for
        float64 parameters), whatever the parameter's dtype.

        Raises:
            RuntimeError: The state was saved with amsgrad.
            ValueError: Groups do not fit, or a parameter's state is not that of Adam.
        """
        for group in state_dict["param_groups"]:
            _check_amsgrad(group)
        for index, state in state_dict["state"].items():
            missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in state]
            if state and missing:
                raise ValueError(
                    f"FusedAdam.load_state_dict: state[{index}] has {[*state]} and lacks {missing}; "
                    "it must be the state of an Adam optimizer"
                )
        super().load_state_dict(dict(state_dict))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            for param in group["params"]:
                param_state = self.state.get(param)
                if param_state and not torch.is_tensor(param_state["step"]):
                    param_state["step"] = torch.tensor(
                        float(param_state["step"]), dtype=torch.float32, device=param.device
                    )

    @staticmethod
    def _process_value_according_to_param_policy(
        param: Tensor,
        value: Tensor,
        param_id: int,
        param_groups: list[dict[Any, Any]],
        key: Any = None,
    ) -> Tensor:
        # torch would cast the moments of a float16 parameter to float16, which loses them.
        if key in ("step", "master_param"):
            return value.to(dtype=torch.float32, device=param.device)
        if not value.is_floating_point():
            return value.to(device=param.device)
        return value.to(dtype=_moment_dtype(param), device=param.device)


def _moment_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _number_on(value: float | Tensor, device: torch.device) -> Tensor:
    """A number as the operators take it: a tensor on the CPU, or on the device of the call."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value if value.device.type == "cpu" else value.to(device)


def _inverse(
    scale: float | Tensor,
    norm: float | Tensor | None,
    group: dict[str, Any],
    grad_lists: list[list[Tensor]],
) -> float | Tensor:
    """1 / (scale * clip), with clip = max(1, (norm / scale + 1e-6) / max_grad_norm) as apex had it."""
    sign = -1.0 if group["maximize"] else 1.0
    scale = scale.double() if isinstance(scale, Tensor) else float(scale)
    max_norm = group["max_grad_norm"]
    if max_norm <= 0 or not grad_lists:
        return sign / scale
    if norm is None:
        norm = _grads.norm(grad_lists)
    excess = (norm / scale + 1e-6) / max_norm
    clip = excess.double().clamp(min=1.0) if isinstance(excess, Tensor) else max(1.0, excess)
    return sign / (scale * clip)


def _check_amsgrad(group: Mapping[str, Any]) -> None:
    if group.get("amsgrad"):
        raise RuntimeError("FusedAdam does not support the AMSGrad variant.")


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    _check_amsgrad(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"FusedAdam: lr is a tensor of {lr.numel()} elements; it must have 1")
    # A tensor lr may live on a GPU; looking at it would make the host wait.
    numbers = {"eps": group["eps"], "weight_decay": group["weight_decay"]}
    numbers |= {} if isinstance(lr, Tensor) else {"lr": lr}
    numbers |= {"max_grad_norm": group["max_grad_norm"]}
    for name, value in numbers.items():
        if not value >= 0.0:
            raise ValueError(f"FusedAdam: {name} is {value}; it must be 0 or more")
    if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"FusedAdam: betas is {group['betas']}; it must be two numbers in [0, 1)")
