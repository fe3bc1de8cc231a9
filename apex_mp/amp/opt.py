"""OptimWrapper: an optimizer with several losses, each of which has a scale of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from apex_mp.amp._scale_loss.block import scaled_backward
from apex_mp.amp._scale_loss.step_guard import step_was_skipped
from apex_mp.core.state_checks import as_dict
from apex_mp.loss_scale import is_of_grad_scaler
from apex_mp.saved import inner_state
from apex_mp.saved.dcp import CheckpointView, with_checkpoint_view
from apex_mp.step.delegating import ForwardingOptimizer


class OptimWrapper(ForwardingOptimizer):
    """An optimizer with scales for several losses, from `amp_handle.wrap_optimizer`.

    Between two steps each loss is scaled once, always in the same order:

        with optimizer.scale_loss(loss1) as scaled_loss:
            scaled_loss.backward()
        with optimizer.scale_loss(loss2) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    All other attributes are those of the optimizer inside; a scheduler takes either.

    Args:
        optimizer: A torch optimizer.
        amp_handle: Says whether casts and scaling are on.
        num_loss: Number of losses, at least 1.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `num_loss` is not an int.
        ValueError: `num_loss` is less than 1.
    """

    _inner_name = "_optimizer"

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        if isinstance(optimizer, OptimWrapper) or not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"wrap_optimizer: optimizer is a {type(optimizer).__name__}; it must be an "
                "optimizer that is not wrapped yet"
            )
        if isinstance(num_loss, bool) or not isinstance(num_loss, int):
            raise TypeError(f"wrap_optimizer: num_loss is {num_loss!r}; it must be an int")
        if num_loss < 1:
            raise ValueError(f"wrap_optimizer: num_loss is {num_loss}; it must be at least 1")
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._loss_scaler = [amp_handle._new_scaler() for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the loss times its scale; the gradients are unscaled when the block ends.

        Args:
            loss: The next of the `num_loss` losses.

        Raises:
            RuntimeError: All losses have been scaled since the last step.
        """
        if not self._amp_handle._scales():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._loss_idx + 1} times since the last step, but "
                f"num_loss is {self._num_loss}; give wrap_optimizer the number of losses"
            )
        index = self._loss_idx
        self._loss_idx += 1
        try:
            with scaled_backward(
                loss,
                [self._optimizer],
                self._loss_scaler[index],
                names=self._amp_handle._parameter_names,
            ) as scaled_loss:
                yield scaled_loss
        except BaseException:
            self._loss_idx = index
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless a loss overflowed since the last step.

        Args:
            closure: Refused, unless it is None [None].

        Returns:
            What the optimizer's step returned; None if it was skipped.

        Raises:
            NotImplementedError: There is a closure; use `amp_handle.scale_loss` with those.
        """
        self._loss_idx = 0
        if not self._amp_handle._scales():
            return self._optimizer.step() if closure is None else self._optimizer.step(closure)
        if closure is not None:
            raise NotImplementedError(
                "The `closure` argument is unsupported by the amp optimizer wrapper."
            )
        return self._optimizer.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, for an overflow."""
        return step_was_skipped(self._optimizer)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if not self._amp_handle._scales():
            return False
        raise RuntimeError(
            "An OptimWrapper was given to a GradScaler, but scales losses itself; use "
            "optimizer.scale_loss(loss) and optimizer.step() without GradScaler"
        )

    @with_checkpoint_view
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state_dict, and the state of the scales as "loss_scalers"."""
        return {**self._optimizer.state_dict(), **self._scale_state()}

    def _scale_state(self) -> dict[str, Any]:
        return {"loss_scalers": [scaler.state_dict() for scaler in self._loss_scaler]}

    def _checkpoint_view(self) -> CheckpointView:
        return CheckpointView(
            self._optimizer,
            lambda inner, _, scales: self.load_state_dict({**inner, **scales}),
            extra=self._scale_state(),
        )

    @with_checkpoint_view
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or the state of the optimizer inside.

        Scales stay as they are unless the dict has "loss_scalers", or "loss_scaler0" and so on as
        in `amp.state_dict()`. These alone, or the state of a torch.amp.GradScaler, which had one
        scale for all losses, change the scales and nothing else.

        Args:
            state_dict: What `state_dict` or one of the others returned.

        Raises:
            TypeError, ValueError: There is another number of scales, or the optimizer's part does
                not fit; nothing is changed.
        """
        inner, states = _saved_scales(state_dict, self._num_loss)
        if states is not None and len(states) != self._num_loss:
            raise ValueError(
                f"load_state_dict: there are {len(states)} loss_scalers and num_loss is "
                f"{self._num_loss}; they must match"
            )
        scalers = [self._amp_handle._new_scaler() for _ in self._loss_scaler]
        for scaler, state in zip(scalers, states or [], strict=False):
            scaler.load_state_dict(state)
        if inner or states is None:
            inner_state.check("OptimWrapper", inner, self._optimizer)
            inner_state.load(self._optimizer, inner)
        if states is not None:
            self._loss_scaler = scalers

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_optimizer": self._optimizer,
            "_amp_handle": self._amp_handle,
            "_num_loss": self._num_loss,
            "_loss_scaler": self._loss_scaler,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._loss_idx = 0


def _saved_scales(
    state_dict: dict[str, Any], num_loss: int
) -> tuple[dict[str, Any], list[Any] | None]:
    """Return the optimizer's part of a state_dict and the states of its scales, or None."""
    if is_of_grad_scaler(state_dict):
        return {}, [state_dict] * num_loss
    inner = as_dict("OptimWrapper", state_dict)
    numbered = [key for key in inner if re.fullmatch(r"loss_scaler\d+", key)]
    states = [inner.pop(key) for key in sorted(numbered, key=lambda key: int(key[11:]))]
    return inner, inner.pop("loss_scalers", states or None)
