"""AveragedMasters: torch's AveragedModel over the float32 masters of a 16-bit model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from apex_mp import convert
from apex_mp.masters.masters import LOW_PRECISION

__all__ = ["AveragedMasters"]


class AveragedMasters(AveragedModel):
    """The average of a model's weights (EMA, SWA) in float32, from its optimizer's masters.

        averaged = AveragedMasters(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        ...
        if not scaler.step_was_skipped(optimizer):
            averaged.update_parameters(model)

    An average kept in float16 stands still once a change is smaller than half the distance between
    two float16 numbers, which is soon; one of float16 weights in float32 lacks what only masters
    hold. A copy of it averages the same model on.

    Args:
        model: The model, in mixed precision or not; it is copied.
        optimizer: A fused optimizer with `master_weights`, a MasterWeights, an FP16_Optimizer, or
            one that went through `amp.initialize`; a list of them for a model with several. Without
            masters the weights themselves are averaged, in float32.
        options: As of `torch.optim.swa_utils.AveragedModel`: `device`, `avg_fn`, `multi_avg_fn`,
            `use_buffers`.

    Attributes:
        module: The averaged model, in float32 where `model` has 16 bits.

    Raises:
        TypeError: `optimizer` is no optimizer.
        ValueError: An optimizer steps no parameter of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.module._apply(lambda t: t.float() if t.dtype in LOW_PRECISION else t)  # type: ignore[no-untyped-call]
        self._source = _Source(optimizer)
        values = Values(model, self._masters(model))
        with torch.no_grad():
            for averaged, value in zip(self.module.parameters(), values.parameters(), strict=True):
                averaged.copy_(value)

    def _masters(self, model: nn.Module) -> Mapping[int, Tensor]:
        return convert.current_masters("AveragedMasters", model, self._source.optimizer)

    def update_parameters(self, model: nn.Module) -> None:
        """Add the present masters to the average.

        Args:
            model: The model that the constructor was given.
        """
        super().update_parameters(Values(model, self._masters(model)))


class _Source:
    """The optimizer of the masters, which a copy of the average shares.

    Args:
        optimizer: As of `AveragedMasters`.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        # Its copy, if that was made before within the same call.
        return _Source(memo.get(id(self.optimizer), self.optimizer))


class Values(nn.Module):
    """A model's parameters with their float32 masters, and its buffers: what a torch average reads.

    Args:
        model: The model.
        masters: By id() of a parameter.
    """

    def __init__(self, model: nn.Module, masters: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._of = model, masters  # In a tuple, so that it is no child.

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield the values of all parameters."""
        model, masters = self._of
        for param in model.parameters(recurse):
            value = masters.get(id(param), param)
            yield value.float() if value.dtype in LOW_PRECISION else value

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers."""
        return self._of[0].buffers(recurse)
