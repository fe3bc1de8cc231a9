"""Monitor: listens to an optimizer or a scaler, and keeps what became of its steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from apex_mp import _step_notes, device_scale
from apex_mp._step_notes import StepNote
from apex_mp.amp.handle import AmpHandle, NoOpHandle
from apex_mp.amp.opt import OptimWrapper
from apex_mp.monitor import _report
from apex_mp.monitor.history import History, Step


class Writer(Protocol):
    """What a `SummaryWriter` of TensorBoard can do."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record a number of a step."""


class Monitor:
    """Keep what became of the steps of a training with a loss scale.

        monitor = Monitor(optimizer)
        ...
        print(monitor.report())

    It listens to what it is given until `close` is called. It measures nothing: it keeps what steps
    find out anyway. On a GPU the host does not wait for a step; what became of it is heard at a
    later step, and by `report`, `plot`, `save` and `history`, which wait.

    Args:
        source: An FP16_Optimizer, an `apex_mp.amp.GradScaler`, an optimizer whose loss goes through
            `scale_loss`, what `wrap_optimizer` returned, or the handle that `amp.init` returned,
            for all optimizers with its scale. None: `record` is called by hand [None].
        length: How many steps are kept [10000].
        callback: Is called with each `Step` [None].
        writer: A TensorBoard `SummaryWriter`, or anything else with its `add_scalar` [None].
        tag: What the names of its curves begin with ["amp"].

    Raises:
        TypeError: `source` is nothing that steps can be heard from.
        ValueError: `length` is less than 1, or the handle has given its scale to wrappers.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        length: int = 10_000,
        callback: Callable[[Step], None] | None = None,
        writer: Writer | None = None,
        tag: str = "amp",
    ) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"Monitor: length is {length!r}; it must be an int of at least 1")
        owner = _owner(source)
        self._history = History(length)
        self._callback = callback
        self._writer = writer
        self._tag = tag
        self._begun = 0  # The number of the last step whose gradients were complete.
        # What was measured for steps of which the host has yet to hear.
        self._measured: dict[int, dict[str, float]] = {}
        if owner is not None:
            _step_notes.listen(owner, self)

    def close(self) -> None:
        """Stop listening; what was heard stays."""
        device_scale.settle(wait=True)
        _step_notes.unlisten(self)

    # What is heard.

    def before_step(
        self, scale: float | Tensor = 1.0, unscaled: Collection[torch.dtype] = ()
    ) -> None:
        """Hear that the gradients of the next step are complete."""
        self._begun += 1

    def note(
        self, *, grad_norm: float | Tensor | None = None, clip: float | Tensor | None = None
    ) -> None:
        """Add to the next step what its loop has measured; call it before the step.

        Args:
            grad_norm: l2 norm of the unscaled gradients before clipping, for example what
                `torch.nn.utils.clip_grad_norm_` returns. Of a tensor on a GPU the host hears later.
            clip: What the gradients were multiplied by to clip them.
        """
        number = max(self._begun, self._history.total) + 1
        for name, value in (("grad_norm", grad_norm), ("clip", clip)):
            if isinstance(value, Tensor) and value.device.type in device_scale.DEVICE_TYPES:
                tell = functools.partial(self._measure_later, number, name)
                device_scale.send([value], tell)
            elif value is not None:
                self._measure(number, name, float(value))

    def _measure_later(self, number: int, name: str, values: list[float]) -> None:
        self._measure(number, name, values[0])

    def _measure(self, number: int, name: str, value: float) -> None:
        self._measured.setdefault(number, {})[name] = value

    def after_step(self, note: StepNote) -> None:
        """Hear what became of a step."""
        number = self._history.total + 1
        self._begun = max(self._begun, number)
        measured = self._measured.pop(number, {})
        step = Step(
            number=number,
            scale=float(note.scale),
            skipped=bool(note.skipped),
            grad_norm=None if note.skipped else measured.get("grad_norm", note.grad_norm),
            clip=None if note.skipped else measured.get("clip", note.clip),
            overflow=tuple(note.overflow),
        )
        self._history.add(step)
        self._pass_on(step)

    def record(
        self,
        *,
        scale: float = 1.0,
        skipped: bool = False,
        grad_norm: float | None = None,
        clip: float | None = None,
    ) -> None:
        """Keep a step of a loop that has no source to listen to.

        Args:
            scale: The loss scale of its gradients [1].
            skipped: Whether it was skipped [False].
            grad_norm: l2 norm of the unscaled gradients before clipping [None].
            clip: What the gradients were multiplied by to clip them [None].
        """
        self.after_step(
            StepNote(float(scale), float(scale), bool(skipped), grad_norm=grad_norm, clip=clip)
        )

    def _pass_on(self, step: Step) -> None:
        if self._writer is not None:
            self._writer.add_scalar(f"{self._tag}/loss_scale", step.scale, step.number)
            self._writer.add_scalar(f"{self._tag}/skipped", float(step.skipped), step.number)
            for name in ("grad_norm", "clip"):
                value = getattr(step, name)
                if value is not None:
                    self._writer.add_scalar(f"{self._tag}/{name}", value, step.number)
        if self._callback is not None:
            self._callback(step)

    # What was heard.

    @property
    def history(self) -> History:
        """The steps that are kept; on a GPU the host waits for the last ones."""
        device_scale.settle(wait=True)
        return self._history

    def report(self) -> str:
        """Return the run so far as a few lines of text."""
        return _report.text(self.history)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write the run so far as a picture; needs matplotlib.

        Args:
            path: A file; its suffix says the format, for example .png or .svg.
        """
        from apex_mp.monitor import _picture  # Matplotlib takes half a second to import.

        _picture.draw(self.history, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is kept as JSON, for `History.load` and `python -m apex_mp report`."""
        self.history.save(path)

    def postfix(self) -> dict[str, str]:
        """Return the loss scale and the number of skipped steps for a progress bar.

            bar.set_postfix(monitor.postfix())

        The host does not wait: on a GPU the last steps may be missing.
        """
        device_scale.settle(wait=False)
        scale = self._history.steps[-1].scale if self._history.steps else None
        shown = "?" if scale is None else _report.power(scale)
        return {"scale": shown, "skips": str(self._history.skipped)}


def _owner(source: Any) -> Any:
    """Return whose steps are heard if a user gives `source`."""
    if source is None or isinstance(source, torch.optim.Optimizer | torch.amp.GradScaler):
        return source._optimizer if isinstance(source, OptimWrapper) else source
    if isinstance(source, NoOpHandle):
        return None
    if isinstance(source, AmpHandle):
        if source._default_scaler is None:
            raise ValueError(
                "Monitor: the handle has given its scale to wrap_optimizer; give the Monitor what "
                "that returned"
            )
        return source._default_scaler
    raise TypeError(
        f"Monitor: source is a {type(source).__name__}; it must be an FP16_Optimizer, a GradScaler "
        "of apex_mp.amp, an optimizer, or the handle of amp.init"
    )
