"""MasterWeights: float32 masters for any optimizer."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.checkpoints.state_checks import as_dict
from apex_mp.core.grads.grad_slots import Grads, GradSlots
from apex_mp.core.masters.class_with import class_with, own_class
from apex_mp.core.masters.exchange import Exchange, exchanged
from apex_mp.core.masters.masters import widened
from apex_mp.core.step.scaled_step import GradCheck, ScaledStep, dropping_amp_tensors
from apex_mp.core.step.skips import ParamNames
from apex_mp.optimizers import _legacy_call
from apex_mp.optimizers._float32_grads import Float32Grads, check_gradients, result_of
from apex_mp.optimizers._own_masters import OwnMasters, is_low
from apex_mp.optimizers._state import MASTER


class MasterWeights(torch.optim.Optimizer):
    """Any optimizer, with float32 masters of its float16 and bfloat16 parameters.

        optimizer = MasterWeights(model.parameters(), torch.optim.Muon, lr=1e-3)

    The result is an optimizer of that class, with its options, groups and state, and its step
    computes as if the parameters were float32: in a step each 16-bit parameter holds its master and
    a float32 gradient, and after it the master, rounded. Schedulers, hooks, closures and
    checkpoints work as with the optimizer alone.

    `apex_mp.amp.GradScaler` leaves unscaling to the step, which does it on the way to float32
    gradients, so none underflows. The host waits once a step for the outcome. A weight that was
    written between steps replaces its master, with a warning.

    FusedAdam and the other fused optimizers keep masters by themselves, in fewer passes.

    Args:
        params: What the optimizer's class takes; or an optimizer, which gets masters in place.
        optimizer_class: The class [None: `params` is an optimizer].
        master_weights: True: masters of 4 bytes an element. "split": 2 bytes, the part of the
            master that the weight does not hold; the whole master is made for the step, so it
            works with an optimizer that keeps no view of a parameter between steps [True].
        keep_grads: Keep the memory of float32 gradients between steps, 4 bytes an element, instead
            of allocating it in each [False].
        options: Passed on to the class.

    Raises:
        TypeError: `params` is an optimizer and has masters, a `step` that was replaced, or a first
            base such as ABC; the class is none of optimizers; or `keep_grads` is no bool.
        ValueError: `master_weights` is something else.
    """

    # As of a fused optimizer: torch.amp.GradScaler leaves unscaling and skipping to `step`.
    _step_supports_amp_scaling = True
    has_all_masters = True  # so that no update is lost
    unscale_grads: bool | None = None
    _steps_taken = 0  # or tried
    _is_stepping = False
    _masters: OwnMasters
    _float32_grads: Float32Grads

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an optimizer of the given class; of the class of one with masters, none has."""
        if cls is not MasterWeights:
            return own_class(cls)(*args, **options)
        return _new(*args, **options)

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        *,
        master_weights: bool | str = True,
        keep_grads: bool = False,
        **options: Any,
    ) -> None:
        """The optimizer is complete: see `__new__`."""

    # --- The step.

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take one step of the optimizer with masters; arguments and result are its own.

        Returns:
            What the optimizer's own step returns; None if it was skipped.

        Raises:
            RuntimeError: The gradient of a 16-bit parameter is sparse, or a closure was given
                inside a GradScaler.
        """
        name = type(self).__name__
        with dropping_amp_tensors(self):
            step = _legacy_call.scaled_step(name, self, None, None, 1.0, None)
            self._steps_taken += 1
            self._masters.counts.steps += 1
            if closure is not None:
                if step.check or step.found_inf is not None:
                    raise RuntimeError(f"{name}.step: no closure can be given inside a GradScaler")
                return self._step_with(closure, *args, **kwargs)
            grads = self._grads()
            found, new = self._float32_grads.of(grads, step, self._name)
            step.result = result_of(grads, found, step)
            if step.result.outcome.found_inf:
                self._masters.counts.skipped += 1
                return None
            masters = self._whole()
            with self._stepping(), exchanged(masters, new):
                value = super().step(*args, **kwargs)
            self._write(masters)
            return value

    step.takes_scaled_step = True  # type: ignore[attr-defined]
    # The optimizer's own step runs the hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def _step_with(self, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step with a closure, which computes with the rounded masters, each time it is called."""
        masters: dict[Tensor, Tensor] = {}
        new: dict[Tensor, Tensor] = {}
        exchange = Exchange(masters, new)

        def enter() -> None:
            _, grads = self._float32_grads.of(self._grads(), ScaledStep(), self._name)
            new.clear()
            new.update(grads)
            if not masters:
                masters.update(self._whole())
            exchange.enter()

        @functools.wraps(closure)
        def with_weights() -> Any:
            exchange.leave()
            exchange.copy_to_weights()
            try:
                return closure()
            finally:
                with torch.no_grad():
                    enter()

        with exchange.ending(), self._stepping():
            with torch.no_grad():
                enter()
            value = super().step(with_weights, *args, **kwargs)
        self._write(masters)
        return value

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """A context of the optimizer's own step: torch's fused ones do not unscale again."""
        attributes = vars(self)
        names = ("grad_scale", "found_inf", "scaled_step")
        hidden = {name: attributes.pop(name) for name in names if name in attributes}
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            attributes.update(hidden)

    def _whole(self) -> dict[Tensor, Tensor]:
        """Return the masters for a step: of all 16-bit parameters that require grad.

        An optimizer may change those without a gradient, too.
        """
        groups = self.param_groups
        params = [p for group in groups for p in group["params"] if is_low(p) and p.requires_grad]
        for param in params:
            if param not in self._masters.kept and param in self.state:  # Made in 16 bits.
                state = self.state[param]
                state.update({key: widened(value) for key, value in state.items()})
        return self._masters.whole(params, lambda: ParamNames(None, None).params(groups))

    def _write(self, masters: dict[Tensor, Tensor]) -> None:
        if not self._masters.split:  # Else the weight is one part of the master.
            Exchange(masters, {}).copy_to_weights()
        self._masters.keep(masters)

    # --- Gradients.

    def _grads(self) -> Grads:
        return GradSlots(self.param_groups).read()

    def check_gradients(self, step: ScaledStep) -> GradCheck:
        """Check and measure gradients for a step that GradScaler takes later.

        Args:
            step: That step; it has the scale.

        Returns:
            What was found; gradients stay as they are.

        Raises:
            RuntimeError: A gradient is sparse, or on a device without kernels.
        """
        return check_gradients(self._grads(), step, self._name)

    def _name(self, param: Tensor) -> str:
        named = ParamNames(None, None).params(self.param_groups)
        return next((name for name, each in named if each is param), "a parameter")

    # --- Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own, with a float32 `master_param` in the state of parameters."""
        saved: dict[str, Any] = super().state_dict()
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = itertools.chain.from_iterable(g["params"] for g in saved["param_groups"])
        number_of = dict(zip(params, numbers, strict=True))
        for param, master in self._masters.saved():
            if param in number_of:
                number = number_of[param]
                saved["state"][number] = {**saved["state"].get(number, {}), MASTER: master}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this optimizer, or of one of its class without masters.

        Masters that it lacks are made from the weights.
        """
        saved = as_dict(type(self).__name__, state_dict)
        states, masters = dict[Any, Any](), dict[Any, Tensor]()
        for key, state in saved.get("state", {}).items():
            if isinstance(state, Mapping) and MASTER in state:
                masters[key] = state[MASTER]
                state = {name: value for name, value in state.items() if name != MASTER}
                if not state:
                    continue
            states[key] = state
        saved["state"] = states
        groups = zip(self.param_groups, saved.get("param_groups", ()), strict=False)
        loaded = {
            param: masters[key].to(param.device, torch.float32, copy=True)
            for group, of_saved in groups
            for param, key in zip(group["params"], of_saved["params"], strict=False)
            if key in masters and is_low(param)
        }
        low = (p for group in self.param_groups for p in group["params"] if is_low(p))
        # torch casts state to the dtype of its parameter.
        wide = {param: loaded.get(param, param.detach().float()) for param in low}
        with torch.no_grad(), exchanged(wide, {}):
            super().load_state_dict(saved)
        self._masters.load(loaded)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as the optimizer's own class does, with the masters."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, own, *items = reduced
        own_type = own_class(type(self))
        plain = tuple(own_type if each is type(self) else each for each in args)
        kept = [*self._masters.kept.items()]
        more = (kept, self._masters.split, self._float32_grads.kept is not None)
        return _remake, (make, plain), (own, more), *items

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            state, (kept, split, keep_grads) = state
            _put_masters(self, split, keep_grads)
            self._masters.load(dict(kept))
        super().__setstate__(state)


def _new(
    params: Any,
    optimizer_class: Any = None,
    *,
    master_weights: bool | str = True,
    keep_grads: bool = False,
    **options: Any,
) -> Any:
    if master_weights is not True and master_weights != "split":
        raise ValueError(
            f'MasterWeights: master_weights is {master_weights!r}; it must be True or "split"'
        )
    if not isinstance(keep_grads, bool):
        raise TypeError(f"MasterWeights: keep_grads is {keep_grads!r}; it must be True or False")
    given = params if isinstance(params, torch.optim.Optimizer) else None
    if given is not None and (optimizer_class is not None or options):
        raise TypeError(
            f"MasterWeights: params is a {type(given).__name__}, and a class or options were given "
            "too; give an optimizer alone, or parameters, a class and its options"
        )
    cls: Any = optimizer_class if given is None else type(given)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"MasterWeights: optimizer_class is {cls!r}; it must be a class of optimizers, such as "
            "torch.optim.Muon"
        )
    if hasattr(cls, "has_all_masters") or hasattr(cls, "_amp_masters") or _keeps_own(cls):
        raise TypeError(
            f"MasterWeights: {cls.__name__} keeps masters by itself; use it without MasterWeights, "
            f"a fused one as {cls.__name__}(..., master_weights=True)"
        )
    if given is not None and "step" in vars(given):
        raise TypeError(
            f"MasterWeights: the step of this {cls.__name__} was replaced, as schedulers do; make "
            "masters before that"
        )
    if given is None:
        params = _listed(params)
        # Some make state in the constructor, in the dtype of the parameters.
        with torch.no_grad(), exchanged({p: p.detach().float() for p in _low(params)}, {}):
            optimizer: Any = cls(params, **options)
    else:
        optimizer = given
    return give_masters(
        optimizer,
        split=master_weights == "split",
        keep_grads=keep_grads,
        is_new=given is None,
    )


def give_masters(
    optimizer: Any, *, split: bool = False, keep_grads: bool = False, is_new: bool = False
) -> Any:
    """Give masters to an optimizer in place, and return it.

    Args:
        optimizer: The optimizer.
        split: Keep remainders between steps [False].
        keep_grads: Keep the memory of gradients [False].
        is_new: Nobody else has the optimizer, so another object may be returned [False].

    Raises:
        TypeError: Its class has a base, such as ABC, with which Python does not let it be changed.
    """
    cls = type(optimizer)
    members = {
        name: _in_float32(getattr(cls, name)) for name in ("train", "eval") if hasattr(cls, name)
    }
    with_masters = class_with(MasterWeights, cls, members)
    try:
        optimizer.__class__ = with_masters
    except TypeError:
        if not is_new:
            raise TypeError(
                f"MasterWeights: Python cannot change the class of an object of {cls.__name__}, "
                f"whose first base is {cls.__bases__[0].__name__}; make the optimizer by "
                f"MasterWeights(params, {cls.__name__}, ...)"
            ) from None
        attributes, optimizer = vars(optimizer), object.__new__(with_masters)
        vars(optimizer).update(attributes)
    _put_masters(optimizer, split, keep_grads)
    return optimizer


def _in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method, of a schedule-free optimizer, that changes parameters in float32 as well."""

    @functools.wraps(method)
    def in_float32(optimizer: MasterWeights, *args: Any, **kwargs: Any) -> Any:
        masters = optimizer._whole()
        with torch.no_grad(), exchanged(masters, {}):
            result = method(optimizer, *args, **kwargs)
        optimizer._write(masters)
        return result

    return in_float32


def _listed(params: Any) -> Any:
    """Return what an optimizer takes as parameters, with each iterator as a list."""
    if isinstance(params, Mapping):
        return {**params, "params": _listed(params["params"])} if "params" in params else params
    return [*map(_listed, params)] if isinstance(params, (list, Iterator)) else params


def _low(params: Any) -> Iterator[Tensor]:
    """Yield the 16-bit parameters among what an optimizer takes as parameters."""
    if isinstance(params, Tensor):
        if is_low(params):
            yield params
        return
    if isinstance(params, Mapping):
        params = params.get("params", ())
    for each in params if isinstance(params, (list, tuple)) else ():
        yield from _low(each)


def _keeps_own(cls: type) -> bool:
    return getattr(getattr(cls, "step", None), "takes_scaled_step", False)


def _put_masters(optimizer: Any, split: bool, keep_grads: bool) -> None:
    optimizer._masters = OwnMasters(type(optimizer).__name__, split)
    optimizer._float32_grads = Float32Grads(keep_grads)


def _remake(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    optimizer = make(*args)
    optimizer.__class__ = class_with(MasterWeights, type(optimizer), {})
    return optimizer
