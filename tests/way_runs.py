"""A model that trains by each API with a loss scale, behind one interface: see ways.py."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from fp16_cases import BF16, F16, F32
from fused_adam_cases import without_zeros
from several_devices_cases import spread
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.amp import _amp_state
from apex_mp.loss_scale import DynamicLossScale, LossScale
from apex_mp.optimizers._fused import FusedOptimizer

RULE = DynamicLossScale(2.0**10, growth_interval=4)


class Model(nn.Module):
    """Three parameters, of which bfloat16 and float16 hold the values; one is of even size."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {"a": (3, 3), "b": (5,), "c": (2, 2, 3)}

    def __init__(
        self,
        dtypes: Iterable[torch.dtype],
        device: torch.device,
        lay: Callable[[Tensor], Tensor] = lambda values: values,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        for index, ((name, shape), dtype) in enumerate(
            zip(self.shapes.items(), dtypes, strict=True)
        ):
            values = lay(exact(shape, 100 + index).to(device, dtype))
            setattr(self, name, Parameter(values, requires_grad=not (frozen and index == 0)))

    def forward(self) -> Tensor:
        """Return a loss that is a quadratic with its minimum at 0.25."""
        return torch.stack([(p.float() - 0.25).square().sum() for p in self.parameters()]).sum()


def exact(shape: Iterable[int], seed: int) -> Tensor:
    """Return multiples of 1/4 between -2 and 2, none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 9, tuple(shape), generator=generator) / 4.0
    return values * (torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1)


class Run:
    """A model that trains in one way.

    Attributes:
        optimizer: What the script calls.
        params: The parameters of the model, in the order of the optimizer's groups.
        skipped_class: How warnings call the way.
    """

    speaker: ClassVar[str]

    def __init__(
        self, way: Any, device: torch.device, rule: LossScale, *, sides: int = 1, **model: Any
    ) -> None:
        self.way, self.device = way, device
        dtypes = (F16, F32, BF16) if way.store in ("whole", "split", "host", "own") else (F32,) * 3
        self.model: Any = Model(dtypes, device, **model)
        self.params: list[Parameter] = [*self.model.parameters()]
        self.optimizer: Any = way.make(self.params)
        self.prepare(rule)
        if sides == 2 and isinstance(self.inner, FusedOptimizer) and way.store != "host":
            spread(self.inner)

    def prepare(self, rule: LossScale) -> None:
        raise NotImplementedError

    # An iteration

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def clip(self, max_norm: float) -> Tensor:
        raise NotImplementedError

    def step(self, *closure: Any) -> Any:
        return self.optimizer.step(*closure)

    def unscaled(self) -> list[Any]:
        """Return what has the unscaled gradients that the step will use."""
        return self.masters()

    # What came of it

    @property
    def skipped(self) -> bool:
        return amp.step_was_skipped(self.optimizer)

    @property
    def scale(self) -> float:
        raise NotImplementedError

    def report(self) -> list[Any]:
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return what messages call the parameters."""
        return [name for name, _ in self.model.named_parameters()]

    def inner_state(self, saved: Any) -> Any:
        """Return the state of the optimizer itself in what the way has saved of it."""
        return saved

    def masters(self) -> list[Tensor]:
        return [*self.params]

    @property
    def inner(self) -> Any:
        """The optimizer itself, inside of a wrapper."""
        return getattr(self.optimizer, "_optimizer", self.optimizer)

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each parameter, without zeros, which a skipped first step leaves."""
        inner = getattr(self.optimizer, "_optimizer", self.optimizer)
        states = getattr(inner, "state", {})
        found = [states.get(param, {}) for group in inner.param_groups for param in group["params"]]
        return [
            {key: value for key, value in without_zeros(state).items() if key != "is_fresh"}
            for state in found
        ]

    def numbers(self) -> list[Any]:
        """Return copies of all that a step may write."""
        tensors = [*self.params, *self.masters()]
        tensors += [state[key] for state in self.states() for key in sorted(state)]
        return [torch.as_tensor(one).detach().clone() for one in tensors if one is not None]

    # Files and copies

    def parts(self) -> dict[str, Any]:
        """Return what has a state_dict."""
        return {"model": self.model, "optimizer": self.optimizer}

    def save(self) -> dict[str, Any]:
        """Return what is in a file, as it is read from it."""
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(copy.deepcopy(saved[name]))

    def copied(self, by: Callable[[Any], Any]) -> Run:
        """Return a run with a copy of model, optimizer and scaler."""
        other = copy.copy(self)
        vars(other).update(by({name: vars(self)[name] for name in self.copies()}))
        other.params = [*other.model.parameters()]
        return other

    def copies(self) -> tuple[str, ...]:
        return "model", "optimizer"


class Scaled(Run):
    """A GradScaler."""

    scaler_class: ClassVar[Any] = amp.GradScaler
    speaker = "GradScaler"

    def prepare(self, rule: Any) -> None:
        self.scaler: Any = self.new_scaler(rule)

    def new_scaler(self, rule: Any) -> Any:
        bounds = {"min_scale": rule.min_scale, "max_scale": rule.max_scale}
        bounds = {} if rule == dataclasses.replace(RULE, scale=rule.scale) else bounds
        return amp.GradScaler(
            self.device.type,
            rule.scale,
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
            hysteresis=rule.hysteresis,
            model=self.model,
            **bounds,
        )

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self, max_norm: float) -> Tensor:
        return self.scaler.clip_grad_norm_(self.optimizer, max_norm)

    def step(self, *closure: Any) -> Any:
        result = self.scaler.step(self.optimizer, *closure)
        self.scaler.update()
        return result

    @property
    def skipped(self) -> bool:
        return self.scaler.step_was_skipped(self.optimizer)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def report(self) -> list[Any]:
        return self.scaler.overflow_report(self.optimizer)

    def unscaled(self) -> list[Any]:
        if self.scaler._per_optimizer_states[id(self.optimizer)]["stage"].name == "READY":
            self.scaler.unscale_(self.optimizer)
        return [*self.params]

    def masters(self) -> list[Tensor]:
        return [p if p.dtype == F32 else self.optimizer.master(p) for p in self.params]

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "scaler": self.scaler}

    def copies(self) -> tuple[str, ...]:
        return "model", "optimizer", "scaler"


class ScaledByTorch(Scaled):
    """torch's GradScaler, which says of no step whether it was skipped: its scale does."""

    before = 0.0

    def new_scaler(self, rule: Any) -> Any:
        return torch.amp.GradScaler(
            self.device.type,
            rule.scale,
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
        )

    def clip(self, max_norm: float) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        return clip_grad_norm_(self.params, max_norm)

    def step(self, *closure: Any) -> Any:
        self.before = self.scaler.get_scale()
        return super().step(*closure)

    @property
    def skipped(self) -> bool:
        return self.scaler.get_scale() < self.before


class Half(Run):
    """FP16_Optimizer."""

    speaker = "FP16_Optimizer"
    face: ClassVar[Any] = fp16_utils.FP16_Optimizer

    def prepare(self, rule: LossScale) -> None:
        self.optimizer = self.face(self.optimizer, rule, verbose=False, model=self.model)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # The faces have different defaults.

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

    def clip(self, max_norm: float) -> Tensor:
        return self.optimizer.clip_master_grads(max_norm)

    @property
    def skipped(self) -> bool:
        return self.optimizer.overflow

    @property
    def scale(self) -> float:
        return self.optimizer.loss_scale

    def report(self) -> list[Any]:
        return self.optimizer.overflow_report

    def masters(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def inner(self) -> Any:
        return self.optimizer.optimizer

    def inner_state(self, saved: Any) -> Any:
        return saved["optimizer_state_dict"]


class FusedHalf(Half):
    """The face of apex_mp.optimizers."""

    face = optimizers.FP16_Optimizer


class Handle(Run):
    """amp.init() and `handle.scale_loss`."""

    speaker = "amp"

    def prepare(self, rule: LossScale) -> None:
        self.handle: Any = amp.init(loss_scale=rule, device_type=self.device.type)

    def backward(self, loss: Tensor) -> None:
        with self.handle.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self.params, max_norm)

    @property
    def scale(self) -> float:
        return self.handle._default_scaler.loss_scale()

    def names(self) -> list[str]:
        return [f"group 0, parameter {index}" for index in range(len(self.params))]

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "handle": self.handle}


class Wrapped(Handle):
    """amp.init() and `handle.wrap_optimizer`, with a scale for each of three losses."""

    def prepare(self, rule: LossScale) -> None:
        super().prepare(rule)
        self.optimizer = self.handle.wrap_optimizer(self.optimizer, num_loss=3)

    def backward(self, loss: Tensor) -> None:
        with self.optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()

    @property
    def scale(self) -> float:
        return self.optimizer._loss_scaler[0].loss_scale()

    def parts(self) -> dict[str, Any]:
        return Run.parts(self)


class Level(Run):
    """amp.initialize and `amp.scale_loss`."""

    speaker = "amp"

    def prepare(self, rule: LossScale) -> None:
        self.model, self.optimizer = amp.initialize(
            self.model,
            self.optimizer,
            opt_level=self.way.api,
            loss_scale=rule,
            verbosity=0,
            device_type=self.device.type,
        )

    def backward(self, loss: Tensor) -> None:
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self.masters(), max_norm)

    @property
    def scale(self) -> float:
        return _amp_state.loss_scalers[0].loss_scale()

    def masters(self) -> list[Tensor]:
        return [*amp.master_params(self.optimizer)]

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "amp": amp}


APIS: dict[str, type[Run]] = {
    "GradScaler": Scaled,
    "torch's GradScaler": ScaledByTorch,
    "fp16_utils": Half,
    "optimizers": FusedHalf,
    "amp.init": Handle,
    "OptimWrapper": Wrapped,
    "O1": Level,
    "O2": Level,
}
