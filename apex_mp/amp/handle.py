"""The handle that `amp.init()` returns: casts in the whole process, and scaled losses."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from apex_mp.amp._scale_loss.block import scaled_backward
from apex_mp.amp._scale_loss.step_guard import guard_first_closure, remove_guards
from apex_mp.amp.casts import current as _current
from apex_mp.amp.casts import registry
from apex_mp.amp.casts.casting import CastCache, Caster
from apex_mp.amp.casts.patching import Patches
from apex_mp.amp.casts.policy import Rule, rules, unlisted
from apex_mp.amp.casts.scopes import Scopes, show_torch_to_dynamo
from apex_mp.amp.casts.switch import Switch
from apex_mp.amp.opt import OptimWrapper
from apex_mp.core import readback
from apex_mp.core.state_checks import as_dict
from apex_mp.loss_scale import LossScale, is_of_grad_scaler
from apex_mp.scale.amp_scaler import LossScaler


class AmpHandle:
    """Casts that are on, until another `init()` or `_deactivate()`; `amp.init` makes one.

        handle = amp.init()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    Args:
        loss_scale: "dynamic", a number, or a loss scale of `apex_mp.loss_scale` ["dynamic"].
        enable_caching: Cast each weight once for a call of the outermost module [True].
        verbose: Print a line for each tensor that a listed function casts [False].
        allow_banned: Cast to float32 what is refused otherwise: binary_cross_entropy [False].
        dtype: The low precision [torch.float16].
        device_type: Where tensors are cast: "cpu" or "cuda" ["cpu"].
        min_loss_scale: A dynamic scale does not back off below it [None: as of amp.initialize].
        max_loss_scale: A dynamic scale does not grow above it [2**24].

    Raises:
        TypeError, ValueError: An argument is out of range; nothing is changed.
    """

    def __init__(
        self,
        loss_scale: float | str | LossScale = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        allow_banned: bool = False,
        dtype: torch.dtype = torch.float16,
        device_type: str = "cpu",
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self._scaler_arguments = {
            "loss_scale": loss_scale,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        self._default_scaler: LossScaler | None = self._new_scaler()
        self._switch = Switch(device_type, dtype)
        self._caster = Caster(self._switch, enable_caching=enable_caching, verbose=verbose)
        self._scopes = Scopes(self._caster, self._deactivate)
        self._patches = Patches()
        self._rules = [*rules(allow_banned=allow_banned)]
        self._switched_off = threading.local()
        self._was_replaced = False

    def __repr__(self) -> str:
        state = "on" if _current.handle is self else "off"
        place = f"{self._switch.dtype} on {self._switch.device_type!r}"
        scale = None if self._default_scaler is None else self._default_scaler.loss_scale()
        return f"<{type(self).__name__}: casts to {place} are {state}, loss scale {scale}>"

    # Switching on and off.

    def _activate(self) -> None:
        """Switch casts on, in place of the handle whose casts are on."""
        self._check_registrations()
        if _current.handle is not None:
            _current.handle._was_replaced = True
            _current.handle._deactivate()
        show_torch_to_dynamo()
        _current.handle = self
        # Registered before the hook of the scopes, so that an error is raised while casts are on.
        self._hook = register_optimizer_step_pre_hook(guard_first_closure)
        try:
            # Registrations come first: the user's cast of a function replaces that of the lists.
            for registration in registry.registrations.values():
                registration.install(self._patches, self._caster)
            for rule in self._rules:
                if self._needs_wrapper(rule):
                    self._patches.install(
                        rule.owner, rule.name, functools.partial(rule.wrap, caster=self._caster)
                    )
            for owner, name in unlisted(self._caster.device_type):
                if (owner, name) not in self._patches:
                    self._patches.install(owner, name, self._caster.follow)
            self._scopes.open(self._patches)
        except BaseException:
            self._deactivate()
            raise

    def _check_registrations(self) -> None:
        """Raise if a registered function can no longer be replaced."""
        trial = Patches()
        for registration in registry.registrations.values():
            try:
                registration.install(trial, self._caster)
            except (AttributeError, TypeError) as error:
                raise RuntimeError(
                    f"amp.init: the function named {registration.name}, registered in "
                    f"{registration.owner}, cannot be replaced: {error}"
                ) from error
            finally:
                trial.remove_all()

    def _needs_wrapper(self, rule: Rule) -> bool:
        if (rule.owner, rule.name) in self._patches or not hasattr(rule.owner, rule.name):
            return False
        # Verbose output has a line for each cast, whatever makes it.
        return self._caster.verbose or not rule.is_type_promotion()

    def _deactivate(self) -> None:
        """Switch casts off, and leave torch exactly as it was before `init()`."""
        if _current.handle is not self:
            return
        _current.handle = None
        self._switch.active = False
        self._patches.remove_all()
        self._scopes.close()
        self._hook.remove()
        readback.wait()
        remove_guards()

    def is_active(self) -> bool:
        """Return whether casts and loss scaling are on here."""
        return _current.handle is self and not getattr(self._switched_off, "depth", 0)

    def _scales(self) -> bool:
        """Whether losses are scaled: also by a replaced handle, while its successor is active.

        A script keeps using its handle when another part of it calls `init()` again.
        """
        current = _current.handle
        if current is None or not (current is self or self._was_replaced):
            return False
        return current.is_active()

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        """Switch casts and loss scaling off in this thread for a `with` block."""
        depth = getattr(self._switched_off, "depth", 0)
        self._switched_off.depth = depth + 1
        try:
            with self._switch.casts_off():
                yield
        finally:
            self._switched_off.depth = depth

    # Losses.

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any | Sequence[Any]) -> Iterator[Tensor]:
        """Yield the loss times its scale; the gradients are unscaled when the block ends.

            with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

        If a gradient is inf or NaN then, the next step of the optimizer is skipped. Several blocks
        before a step add their gradients.

        Args:
            loss: A floating tensor.
            optimizer: The one that has the parameters, or a list of several.

        Raises:
            RuntimeError: There are wrapped optimizers, which scale by their own method.
        """
        if not self._scales():
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError(
                "After calling `handle.wrap_optimizer()`, you must explicitly use "
                "`optimizer.scale_loss(loss)`."
            )
        optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
        with scaled_backward(
            loss,
            optimizers,
            self._default_scaler,
            names=self._parameter_names,
        ) as scaled_loss:
            yield scaled_loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer with a `scale_loss` of its own, for several losses.

        Args:
            optimizer: A torch optimizer.
            num_loss: Losses before each step, each of which gets its own scale [1].
        """
        wrapper = OptimWrapper(optimizer, self, num_loss)
        self._default_scaler = None
        return wrapper

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale as plain values; {} if wrappers have scales instead.

        `load_state_dict` takes it. The state of a wrapper's scales is in the wrapper's own.
        """
        scaler = self._default_scaler
        return {} if scaler is None else {"loss_scaler0": scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the loss scale.

        Args:
            state_dict: What `state_dict`, `amp.state_dict` with one loss, or that of a GradScaler
                returned.

        Raises:
            ValueError: It has the state of another number of scales; nothing is changed.
        """
        state_dict = as_dict("AmpHandle", state_dict)
        expected = self.state_dict()
        if expected and is_of_grad_scaler(state_dict):
            state_dict = {"loss_scaler0": state_dict}
        if state_dict and state_dict.keys() != expected.keys():
            raise ValueError(
                f"load_state_dict: the keys are {[*state_dict]}; they must be {[*expected]}"
            )
        if state_dict and self._default_scaler is not None:
            self._default_scaler.load_state_dict(state_dict["loss_scaler0"])

    def _new_scaler(self) -> LossScaler:
        return LossScaler(**self._scaler_arguments)  # type: ignore[arg-type]

    def _parameter_names(self) -> dict[int, str]:
        """Return names of the parameters of all modules that have been called, by id()."""
        return self._scopes.parameter_names()

    # Casts of weights that are kept.

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept for the rest of the outermost module's call."""
        return self._caster.enable_caching

    @property
    def cache(self) -> CastCache:
        """The casts that are kept now, by parameter."""
        return self._caster.cache

    def remove_cache(self, param: Tensor) -> None:
        """Drop the kept casts of a parameter.

        Args:
            param: A parameter of the model.
        """
        self._clear_cache()

    def _clear_cache(self) -> None:
        """Drop all kept casts of weights, as happens after each call of a model anyway."""
        self._scopes.clear_cache()

    @property
    def verbose(self) -> bool:
        """Whether casts are printed."""
        return self._caster.verbose

    def __reduce__(self) -> Any:
        # There is one handle in a process, so copies of objects that refer to it share it.
        return _current_or_noop, ()


class NoOpHandle:
    """What `amp.init(enabled=False)` returns: it does nothing and costs nothing."""

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the loss as it is.

        Args:
            loss: Yielded as it is.
            optimizer: Ignored.
        """
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return a wrapper that hands everything to the optimizer.

        Args:
            optimizer: Any optimizer.
            num_loss: As of `AmpHandle.wrap_optimizer` [1].
        """
        return OptimWrapper(optimizer, self, num_loss)

    def state_dict(self) -> dict[str, Any]:
        """Return {}."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing.

        Args:
            state_dict: Ignored.
        """

    @property
    def has_cache(self) -> bool:
        """Whether casts are kept: there are none."""
        return False

    @property
    def cache(self) -> CastCache:
        """An empty cache."""
        return CastCache()

    def remove_cache(self, param: Tensor) -> None:
        """Do nothing.

        Args:
            param: Ignored.
        """

    def _clear_cache(self) -> None:
        pass

    @property
    def verbose(self) -> bool:
        """Whether casts are printed: there are none."""
        return False

    def _deactivate(self) -> None:
        pass

    def _scales(self) -> bool:
        return False

    def _new_scaler(self) -> LossScaler:
        return LossScaler()

    def _parameter_names(self) -> dict[int, str]:
        return {}


def _current_or_noop() -> _current.Handle | NoOpHandle:
    return _current.handle if _current.handle is not None else NoOpHandle()
