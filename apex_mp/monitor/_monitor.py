"""Monitor: listens to an optimizer or a scaler, and records the outcomes of its steps."""

from __future__ import annotations

import dataclasses
import functools
import html
import os
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from apex_mp.amp.grad_scaler import GradScaler
from apex_mp.amp.handle import AmpHandle, NoOpHandle
from apex_mp.amp.opt import OptimWrapper
from apex_mp.core import readback
from apex_mp.core.log import logger, see, warn
from apex_mp.core.tensors import params_of
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.grads.in_host_memory import grad_here
from apex_mp.monitor import _report
from apex_mp.monitor.exponents import Sampler
from apex_mp.monitor.history import History, Step, if_finite
from apex_mp.monitor.origin import Origin, find_nonfinite
from apex_mp.scale import device_scale
from apex_mp.step import step_log

_LOG = logger("apex_mp.monitor")


class Writer(Protocol):
    """The method of TensorBoard's `SummaryWriter` that a Monitor calls."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record a number of a step."""


class LossScaleExhaustedError(RuntimeError):
    """A step was skipped at the smallest loss scale, which cannot be lowered.

    Attributes:
        step: The step.
        origin: Where inf or NaN begins; None if that is not known.
    """

    def __init__(self, step: Step, origin: Origin | None = None) -> None:
        self.step = step
        self.origin = origin
        worst = "".join(f"\n  {found}" for found in step.overflow[:3])
        found_at = "" if origin is None else f"\n{origin}"
        super().__init__(
            f"step {step.number} was skipped at a loss scale of {step.scale:g}, the smallest one: "
            f"gradients hold inf or NaN at every scale{worst}{found_at}"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.step, self.origin)


@dataclasses.dataclass
class _Streak:
    """Consecutive skipped steps of one optimizer, and which warnings were given."""

    skips: int = 0
    origin: Origin | None = None
    has_looked: bool = False
    has_warned: bool = False


class Monitor:
    """Record the steps of a training with a loss scale.

        monitor = Monitor(optimizer)
        ...
        print(monitor.report())

    It listens to `source` until `close` is called. It measures nothing itself: it records what
    steps measure anyway. On a GPU the host does not wait for a step; its outcome is recorded at a
    later step, or by `report`, `plot`, `save` and `history`, which wait.

    Args:
        source: An FP16_Optimizer, an `apex_mp.amp.GradScaler`, an optimizer whose loss goes through
            `scale_loss`, what `wrap_optimizer` returned, or the handle that `amp.init` returned,
            for all optimizers with its scale. None: `record` is called by hand [None].
        length: How many steps are kept [10000].
        callback: Called with each `Step` [None].
        writer: A TensorBoard `SummaryWriter`, or anything else with its `add_scalar` [None].
        tag: The prefix of the names of its curves ["amp"].
        model: The module for `find_nonfinite` [None].
        every: Count the exponents of the gradients at each step whose number is divisible by
            it; needs `model` [None].
        after: After that many skipped steps in a row, run the batch once more by `find_nonfinite`,
            and log where inf or NaN begins; needs `model`, and `run` in each iteration [None].
        at_minimum: What to do when a step is skipped at the smallest loss scale: "warn", once until
            a step is not skipped; "raise" a LossScaleExhaustedError; or a function, called with
            that error each time ["warn"].

    Attributes:
        run: Computes the loss of the present batch, for `find_nonfinite`. Set it in each iteration
            before the step, for example to `lambda x=x, y=y: criterion(model(x), y)`.

    Raises:
        TypeError: `source` does not report steps, or `model` is no module.
        ValueError: `length`, `every` or `after` is no int of at least 1, `every` or `after` is
            given without `model`, `at_minimum` is not one of these, or the handle has wrapped
            optimizers, which have scales of their own.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        length: int = 10_000,
        callback: Callable[[Step], None] | None = None,
        writer: Writer | None = None,
        tag: str = "amp",
        model: torch.nn.Module | None = None,
        every: int | None = None,
        after: int | None = None,
        at_minimum: Literal["warn", "raise"] | Callable[[LossScaleExhaustedError], None] = "warn",
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"Monitor: model is a {type(model).__name__}; it must be a torch.nn.Module"
            )
        for name, count in (("length", length), ("every", every), ("after", after)):
            if count is None and name != "length":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"Monitor: {name} is {count!r}; it must be an int of at least 1")
            if model is None and name != "length":
                raise ValueError(
                    f"Monitor: {name} is {count!r}, but there is no model to look into; give it: "
                    f"Monitor(source, model=model, {name}={count!r})"
                )
        if at_minimum not in ("warn", "raise") and not callable(at_minimum):
            raise ValueError(
                f'Monitor: at_minimum is {at_minimum!r}; it must be "warn", "raise" or a function'
            )
        owner = _owner(source)
        self._awaited = _awaited(source)
        self._history = History(length)
        self._callback = callback
        self._writer = writer
        self._tag = tag
        self._model = model
        self._every = every
        self._after = after
        self._at_minimum = at_minimum
        self.run: Callable[[], Tensor] | None = None
        self._samplers: dict[int, Sampler] = {}  # of the same steps
        # `run` by number of the step, for steps whose outcome the host does not know yet.
        self._runs: dict[int, Callable[[], Tensor]] = {}
        # By id, of optimizers whose steps are being skipped.
        self._streaks: dict[int, _Streak] = {}
        self._begun = 0  # The number of the last step whose gradients were complete.
        # Measurements by number of the step, for steps whose outcome the host does not know yet.
        self._measured: dict[int, dict[str, float]] = {}
        if owner is not None:
            step_log.listen(owner, self)

    def close(self) -> None:
        """Stop listening; recorded steps stay."""
        readback.wait()
        step_log.unlisten(self)

    # Calls of the source.

    def before_step(
        self,
        scale: float | Tensor = 1.0,
        unscaled: Collection[torch.dtype] = (),
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Begin the next step, whose gradients are complete.

        A plain loop calls it before its step if gradients are to be sampled, and `record` after it.

        Args:
            scale: Their loss scale: a number, or a tensor on a device [1].
            unscaled: Dtypes of the gradients that are unscaled already [none].
            optimizer: The optimizer of these gradients; only they are sampled. If it steps
                masters, the model's gradients are sampled, scaled as they are [None: all].
        """
        self._begun += 1
        self._keep(self._begun, scale=scale)
        if self.run is not None:
            self._runs[self._begun] = self.run
        if self._every is not None and self._begun % self._every == 0 and self._model is not None:
            named = [*self._model.named_parameters()]
            if optimizer is not None:
                owned = {*map(id, params_of(optimizer))}
                own = [(name, param) for name, param in named if id(param) in owned]
                named, unscaled = (own, unscaled) if own else (named, ())
            grads = ((name, g) for name, p in named if (g := grad_here(p)) is not None)
            self._samplers[self._begun] = sampler = Sampler(grads, unscaled)
            sampler.run()

    def note(
        self, *, grad_norm: float | Tensor | None = None, clip: float | Tensor | None = None
    ) -> None:
        """Record measurements of a loop with the next step; call it before the step.

        Args:
            grad_norm: l2 norm of the unscaled gradients before clipping, for example what
                `torch.nn.utils.clip_grad_norm_` returns. A tensor on a GPU is read back later.
            clip: The factor by which clipping multiplied the gradients.
        """
        number = max(self._begun, self._history.total) + 1
        self._keep(number, grad_norm=grad_norm, clip=clip)

    def _keep(self, number: int, **values: float | Tensor | None) -> None:
        """Keep measurements of a step until `after_step`."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type in device_scale.DEVICE_TYPES:
                record = functools.partial(self._record, number, name)
                readback.submit([value], record)
            elif value is not None:
                self._measured.setdefault(number, {})[name] = float(value)

    def _record(self, number: int, name: str, values: list[float]) -> None:
        self._measured.setdefault(number, {})[name] = values[0]

    def after_step(self, note: step_log.StepNote) -> None:
        """Record the outcome of a step.

        Args:
            note: The outcome, from the optimizer or scaler.
        """
        readback.wait()  # The outcome of this step is known, so this waits for nothing more.
        number = self._history.total + 1
        self._begun = max(self._begun, number)
        known = self._measured.pop(number, {})
        scale = known.get("scale", 1.0) if note.scale is None else float(note.scale)
        norm = note.grad_norm if note.scaled_norm is None else note.scaled_norm / scale
        norm, clip = known.get("grad_norm", norm), known.get("clip", note.clip)
        step = Step(
            number=number,
            scale=scale,
            skipped=bool(note.skipped),
            grad_norm=None if note.skipped else if_finite(norm),
            clip=None if note.skipped else if_finite(clip),
            overflow=tuple(note.overflow),
        )
        self._history.add(step)
        sampler = self._samplers.pop(number, None)
        if sampler is not None:
            self._history.samples.append(sampler.sample(number, scale))
        self._pass_on(step)
        self._judge(step, note.lowest, id(note.optimizer))

    def withdraw_step(self) -> None:
        """Drop the step that `before_step` began, because it raised an error."""
        if self._begun > self._history.total:
            kept: Any
            for kept in (self._measured, self._runs, self._samplers):
                kept.pop(self._begun, None)
            self._begun -= 1

    def record(
        self,
        *,
        scale: float = 1.0,
        skipped: bool = False,
        grad_norm: float | None = None,
        clip: float | None = None,
    ) -> None:
        """Record a step of a loop without a source.

        Args:
            scale: The loss scale of its gradients [1].
            skipped: Whether it was skipped [False].
            grad_norm: l2 norm of the unscaled gradients before clipping [None].
            clip: The factor by which clipping multiplied the gradients [None].

        Raises:
            TypeError: One is no number.
        """
        numbers = {"scale": scale, "grad_norm": grad_norm, "clip": clip}
        for name, value in numbers.items():
            if value is not None:
                try:
                    numbers[name] = float(value)
                except (TypeError, ValueError, RuntimeError):
                    raise TypeError(
                        f"Monitor.record: {name} is {value!r:.60}; it must be a number"
                    ) from None
        scale, grad_norm, clip = numbers.values()  # type: ignore[assignment]
        self.after_step(step_log.StepNote(bool(skipped), scale, grad_norm=grad_norm, clip=clip))

    def _judge(self, step: Step, lowest: float | None, of: int) -> None:
        """After a skipped step, look for the origin of inf, and act at the smallest loss scale."""
        run = self._runs.pop(step.number, self.run)
        if not step.skipped:
            self._streaks.pop(of, None)
            return
        streak = self._streaks.setdefault(of, _Streak())
        streak.skips += 1
        is_exhausted = lowest is not None and step.scale <= lowest
        is_due = is_exhausted or (self._after is not None and streak.skips >= self._after)
        if is_due and not streak.has_looked and self._model is not None and run is not None:
            streak.has_looked = True
            try:
                streak.origin = find_nonfinite(self._model, run, scale=step.scale)
                found = str(streak.origin or "all is finite when the batch is run once more")
            except RuntimeError as error:  # Out of memory, for one: the training goes on.
                found = f"their origin is unknown: {error}"
            self._history.origins[step.number] = found
            if not is_exhausted:
                found += see("every-step-is-skipped")
                _LOG.warning("%d steps in a row were skipped; %s", streak.skips, found)
        if is_exhausted:
            self._act_at_minimum(LossScaleExhaustedError(step, streak.origin), streak)

    def _act_at_minimum(self, error: LossScaleExhaustedError, streak: _Streak) -> None:
        if self._at_minimum == "raise":
            raise error
        if callable(self._at_minimum):
            self._at_minimum(error)
        elif not streak.has_warned:
            streak.has_warned = True
            warn(str(error), "the-loss-scale-sinks")

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

    # The record.

    @property
    def history(self) -> History:
        """The recorded steps; on a GPU the host waits for the last ones."""
        readback.wait()
        return self._history

    def report(self) -> str:
        """Return the run so far as a few lines of text; without steps, how to get some recorded."""
        return _report.text(self.history) + ("" if self._history.total else f": {self._awaited}")

    def __repr__(self) -> str:
        return f"Monitor({self._history.total} steps, {self._history.skipped} skipped)"

    def _repr_html_(self) -> str:
        """Return the report, for a notebook."""
        return f"<pre>{html.escape(self.report())}</pre>"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the run so far; needs matplotlib.

        Args:
            path: A file to write; its suffix says the format, for example .png or .svg [None].

        Returns:
            The matplotlib Figure, which a notebook shows.
        """
        from apex_mp.monitor import _picture  # Matplotlib takes half a second to import.

        return _picture.draw(self.history, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, for `History.load` and `python -m apex_mp report`.

        Args:
            path: The file's name; an existing file is replaced.
        """
        self.history.save(path)

    def postfix(self) -> dict[str, str]:
        """Return scale and skips for a progress bar, on a GPU perhaps without the last steps.

        bar.set_postfix(monitor.postfix())
        """
        readback.poll()
        scale = self._history.steps[-1].scale if self._history.steps else None
        skips = str(self._history.skipped)
        return {"scale": "?" if scale is None else _report.power(scale), "skips": skips}


def _awaited(source: Any) -> str:
    """Return what the user must do so that steps of the source are recorded."""
    if source is None or isinstance(source, NoOpHandle):
        return "call monitor.record() after each step"
    name = type(source).__name__
    if isinstance(source, GradScaler):
        return f"the {name} has not been used for scaler.step(optimizer)"
    if isinstance(source, FP16_Optimizer):
        return f"the {name} has not been stepped"
    return (
        f"of steps of {name} it hears only if the loss goes through scale_loss. With a GradScaler "
        "give the Monitor that: Monitor(scaler). In a loop without a loss scale make it without a "
        "source, Monitor(), and call monitor.record() after each step"
    )


def _owner(source: Any) -> Any:
    """Return the object whose steps are recorded for the `source` that the user gives."""
    if source is None or isinstance(source, torch.optim.Optimizer | GradScaler):
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
    kind = type(source)
    raise TypeError(
        f"Monitor: source is a {kind.__module__}.{kind.__qualname__}; it must be an "
        "FP16_Optimizer, a GradScaler of apex_mp.amp, an optimizer, or the handle of amp.init"
    )
