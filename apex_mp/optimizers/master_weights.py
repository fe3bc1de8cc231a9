"""MasterWeights: float32 masters for any optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.checkpoints.checkpoint_view import attribute_with_checkpoint_view
from apex_mp.core.checkpoints.state_checks import as_dict
from apex_mp.core.grads.grad_slots import Grads, GradSlots
from apex_mp.core.masters.class_with import class_with, own_class
from apex_mp.core.masters.exchange import Exchange, exchanged
from apex_mp.core.masters.masters import widened
from apex_mp.core.masters.store import (
    MASTER,
    MasterStore,
    StateView,
    listed,
    low_params,
    needs_master,
)
from apex_mp.core.step.scaled_step import GradCheck, ScaledStep, dropping_amp_tensors
from apex_mp.core.step.skips import ParamNames
from apex_mp.optimizers import _legacy_call
from apex_mp.optimizers._float32_grads import Float32Grads, check_gradients, result_of
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers._state import check_own


@dataclasses.dataclass
class StepCounts:
    """The steps of an optimizer, and its masters.

    Attributes:
        owner: The optimizer's class.
        bytes_each: Bytes of a master's element between steps.
        steps: The steps, skipped ones included.
        skipped: Those that were skipped.
        params: The parameters that have a master.
        elements: Their elements.
    """

    owner: str
    bytes_each: int
    steps: int = 0
    skipped: int = 0
    params: int = 0
    elements: int = 0


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
        optimizer_class: The class of the optimizer to make [None: `params` is an optimizer].
        master_weights: True or "float32": masters of 4 bytes an element. "split": 2 bytes, the part
            of the master that the weight does not hold; the whole master is made for the step, so
            it works with an optimizer that keeps no view of a parameter between steps [True].
        keep_grads: Keep the memory of float32 gradients between steps, 4 bytes an element, instead
            of allocating it in each [False].
        options: Passed on to the class.

    Raises:
        TypeError: `params` is an optimizer whose `step` was replaced, or with a first base such as
            ABC, or that came with a class or options; `optimizer_class` is no subclass of
            torch.optim.Optimizer, or keeps masters itself; or `keep_grads` is no bool.
        ValueError: `master_weights` is neither True, "split" nor "float32".
    """

    # As of a fused optimizer: torch.amp.GradScaler leaves unscaling and skipping to `step`.
    _step_supports_amp_scaling = True
    has_all_masters = True  # so that no update is lost
    unscale_grads: bool | None = None
    _steps_taken = 0  # or tried
    _steps_masters = False
    _own_masters: MasterStore
    _is_split: bool
    _counts: StepCounts
    _float32_grads: Float32Grads

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an optimizer of `optimizer_class`.

        `type(optimizer)(params)` makes one without masters.
        """
        if cls is not MasterWeights:
            if len(cls.__bases__) == 1:
                raise TypeError(
                    f"{cls.__name__}: MasterWeights cannot be subclassed; subclass the class of "
                    "the optimizer that it is given"
                )
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
        """Do nothing: `__new__` has made the optimizer."""

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
            self._counts.steps += 1
            if closure is not None:
                if step.check or step.found_inf is not None:
                    raise RuntimeError(f"{name}.step: no closure can be given inside a GradScaler")
                return self.__step_with(closure, *args, **kwargs)
            grads = self.__grads()
            found, new = self._float32_grads.of(grads, step, self.__name)
            step.result = result_of(grads, found, step)
            if step.result.outcome.found_inf:
                self._counts.skipped += 1
                return None
            masters = self._masters_for_step(new)
            with self.__stepping(), exchanged(masters, new):
                value = super().step(*args, **kwargs)
            self._write_masters(masters)
            return value

    step.takes_scaled_step = True  # type: ignore[attr-defined]
    # The optimizer's own step runs the hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def __step_with(self, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step with a closure, which computes with the rounded masters, each time it is called."""
        masters: dict[Tensor, Tensor] = {}
        new: dict[Tensor, Tensor] = {}
        exchange = Exchange(masters, new)

        def enter() -> None:
            _, grads = self._float32_grads.of(self.__grads(), ScaledStep(), self.__name)
            new.clear()
            new.update(grads)
            missing = self._masters_for_step(grads)
            masters.update({p: master for p, master in missing.items() if p not in masters})
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

        with exchange.ending(), self.__stepping():
            with torch.no_grad():
                enter()
            value = super().step(with_weights, *args, **kwargs)
        self._write_masters(masters)
        return value

    @contextlib.contextmanager
    def __stepping(self) -> Iterator[None]:
        """A context for the optimizer's own step, in which torch's fused ones do not unscale."""
        attributes = vars(self)
        names = ("grad_scale", "found_inf", "scaled_step")
        hidden = {name: attributes.pop(name) for name in names if name in attributes}
        self._steps_masters = True
        try:
            yield
        finally:
            self._steps_masters = False
            attributes.update(hidden)

    def _masters_for_step(self, grads: Collection[Tensor] = ()) -> dict[Tensor, Tensor]:
        """Return the masters for a step.

        Args:
            grads: The 16-bit parameters with a gradient. Besides, all that require grad have a
                master: an optimizer may change those without a gradient, too.
        """
        self._own_masters.put_back(self)
        self._own_masters.put_aside(self)
        own = [param for group in self.param_groups for param in group["params"]]
        low = [param for param in own if needs_master(param)]
        params = [param for param in low if param.requires_grad or param in grads]
        for param in params:
            if param not in self._own_masters.kept and param in self.state:  # Made in 16 bits.
                state = self.state[param]
                state.update({key: widened(value) for key, value in state.items()})
        return self._own_masters.whole(params)

    def _write_masters(self, masters: dict[Tensor, Tensor]) -> None:
        if not self._is_split:  # Else the weight is one part of the master.
            Exchange(masters, {}).copy_to_weights()
        self._own_masters.keep(masters, as_remainders=self._is_split)
        kept, counts = self._own_masters.kept, self._counts
        if len(kept) != counts.params:
            counts.params, counts.elements = len(kept), sum(map(torch.numel, kept.values()))

    # --- Gradients.

    def __grads(self) -> Grads:
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
        return check_gradients(self.__grads(), step, self.__name)

    def __name(self, param: Tensor) -> str:
        named = ParamNames(None, None).params(self.param_groups)
        return next((name for name, each in named if each is param), "a parameter")

    # --- Checkpoints and copies.

    def _checkpoint_view(self) -> StateView:
        return StateView(self)

    def master(self, param: Tensor) -> Tensor:
        """Return a copy of the values that steps work on: the master, in float32, or the parameter.

        Args:
            param: A parameter of a group.

        Raises:
            ValueError: It is in no group.
        """
        check_own("MasterWeights.master", self, param)
        self._own_masters.put_back(self)
        return self._own_masters.whole_of(param)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own, with a float32 `master_param` in the state of parameters.

        Hooks of the user's are called before masters are added.
        """
        self._own_masters.put_back(self)
        saved: dict[str, Any] = super().state_dict()
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = itertools.chain.from_iterable(g["params"] for g in saved["param_groups"])
        number_of = dict(zip(params, numbers, strict=True))
        states = saved["state"]
        for param, number in number_of.items():
            master = self._own_masters.saved(param)
            # Without need none: the class alone could not load a state that lacks its entries.
            if master is not None and (number in states or not self._own_masters.is_weight(param)):
                states[number] = {**states.get(number, {}), MASTER: master}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this optimizer, or of one of its class without masters.

        Masters that it lacks are made from the weights; so are those that torch, loading this state
        without MasterWeights, has cast to 16 bits.
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
            if key in masters and needs_master(param) and masters[key].dtype == torch.float32
        }
        low = (p for group in self.param_groups for p in group["params"] if needs_master(p))
        # torch casts state to the dtype of its parameter.
        wide = {param: loaded.get(param, param.detach().float()) for param in low}
        with torch.no_grad(), exchanged(wide, {}):
            super().load_state_dict(saved)
        self._own_masters.load(loaded)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as the optimizer's own class does, with the masters."""
        self._own_masters.put_back(self)
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, own, *items = reduced
        own_type = own_class(type(self))
        plain = tuple(own_type if each is type(self) else each for each in args)
        kept = [*self._own_masters.kept.items()]
        more = (kept, self._is_split, self._float32_grads.kept is not None)
        return _remake, (make, plain), (own, more), *items

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            state, (kept, split, keep_grads) = state
            _put_masters(self, split, keep_grads)
            self._own_masters.load(dict(kept))
        super().__setstate__(state)


def _new(
    params: Any,
    optimizer_class: Any = None,
    *,
    master_weights: bool | str = True,
    keep_grads: bool = False,
    **options: Any,
) -> Any:
    if master_weights is not True and master_weights not in ("split", "float32"):
        raise ValueError(
            f"MasterWeights: master_weights is {master_weights!r}; it must be True, 'split' or "
            "'float32'"
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
    if issubclass(cls, MasterWeights):
        return given  # It has masters.
    if issubclass(cls, FusedOptimizer) or hasattr(cls, "_amp_masters"):
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
        params = listed(params)
        # Some make state in the constructor, in the dtype of the parameters.
        with torch.no_grad(), exchanged({p: p.detach().float() for p in low_params(params)}, {}):
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
    with_masters = _class_with_masters(cls)
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


def _class_with_masters(cls: Any) -> Any:
    members: dict[str, Any] = {
        name: in_float32(getattr(cls, name)) for name in ("train", "eval") if hasattr(cls, name)
    }
    members["state"] = attribute_with_checkpoint_view("state", cls)
    return class_with(MasterWeights, cls, members)


def _put_masters(optimizer: Any, split: bool, keep_grads: bool) -> None:
    if "_own_masters" not in vars(optimizer):
        optimizer._own_masters = MasterStore()
    optimizer._is_split = split
    optimizer._counts = StepCounts(type(optimizer).__name__, 2 if split else 4)
    optimizer._float32_grads = Float32Grads(keep_grads)


def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method, of a schedule-free optimizer, that changes parameters in float32 as well."""

    @functools.wraps(method)
    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        masters = optimizer._masters_for_step()
        with torch.no_grad(), exchanged(masters, {}):
            result = method(optimizer, *args, **kwargs)
        optimizer._write_masters(masters)
        return result

    return call


def _remake(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    optimizer = make(*args)
    cls = type(optimizer)
    optimizer.__class__ = _class_with_masters(cls)
    return optimizer
