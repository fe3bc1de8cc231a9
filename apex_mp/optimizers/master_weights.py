"""MasterWeights: float32 masters for any optimizer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from apex_mp.core.log import counted, warn
from apex_mp.core.state_checks import as_dict
from apex_mp.core.tensors import params_of
from apex_mp.engine.devices import ZERO, zero_group
from apex_mp.grads.grad_slots import Grads, GradSlots
from apex_mp.masters import parallel_masters
from apex_mp.masters.attach import Addition, attach, own
from apex_mp.masters.exchange import Exchange, exchanged
from apex_mp.masters.layout import check_own
from apex_mp.masters.masters import widened
from apex_mp.masters.param_names import ParamNames
from apex_mp.masters.store import MASTER, MasterStore, StateView, listed, low_params, needs_master
from apex_mp.optimizers._equivalents import Equivalent
from apex_mp.optimizers._float32_grads import Float32Grads, check_gradients, result_of
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.saved.dcp import attribute_with_checkpoint_view
from apex_mp.step import step_call
from apex_mp.step.scaled_step import GradCheck, ScaledStep, dropping_amp_tensors


class Settings(NamedTuple):
    """How masters are kept.

    Attributes:
        kind: True, "split" or "float32".
        keep_grads: Keep the memory of gradients.
        by_rule: Step by the rule that computes the same, if there is one.
    """

    kind: bool | str = True
    keep_grads: bool = False
    by_rule: bool = False


class MasterWeights(Addition):
    """Any optimizer, with float32 masters of its float16 and bfloat16 parameters.

        optimizer = MasterWeights(model.parameters(), torch.optim.Muon, lr=1e-3)

    The result is an optimizer of that class, with its options, groups and state, and its step
    computes as if the parameters were float32: in a step each 16-bit parameter holds its master and
    a float32 gradient, and after it the master, rounded. Schedulers, hooks, closures and
    checkpoints work as with the optimizer alone.

    `apex_mp.amp.GradScaler` leaves unscaling to the step, which does it on the way to float32
    gradients, so none underflows. The host waits once a step for the outcome. A weight that was
    written between steps replaces its master. Other methods of the optimizer's own, such as SAM's
    `first_step`, find masters and float32 gradients in place, too.

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
        TypeError: `params` is an optimizer whose `step` was replaced, or that came with a class or
            options; `optimizer_class` is no subclass of torch.optim.Optimizer, or keeps masters
            itself; or `keep_grads` is no bool.
        ValueError: `master_weights` is neither True, "split" nor "float32".
    """

    # As of a fused optimizer: torch.amp.GradScaler leaves unscaling and skipping to `step`.
    _step_supports_amp_scaling = True
    has_all_masters = True  # so that no update is lost
    unscale_grads: bool | None = None
    _steps_masters = False
    _has_warned = False
    _slots: GradSlots | None = None
    _own_masters: MasterStore
    _settings: Settings
    _float32_grads: Float32Grads
    _equivalent: Equivalent | None

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an optimizer of `optimizer_class`.

        `type(optimizer)(params)` makes one without masters.
        """
        if cls is not MasterWeights:
            raise TypeError(
                f"{cls.__name__}: MasterWeights cannot be subclassed; subclass the class of the "
                "optimizer that it is given"
            )
        return _new(*args, **options)

    def __init__(
        self,
        params: Any = None,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        *,
        master_weights: bool | Literal["split", "float32"] = True,
        keep_grads: bool = False,
        **options: Any,
    ) -> None:
        """Do nothing: `__new__` has made the optimizer; a class before it may call this, too."""

    @classmethod
    def _members(cls, own_class: Any) -> dict[str, Any]:
        """Return what else an optimizer gets: methods of its own class, with masters in place."""
        names = {
            name: member
            for each in reversed(own_class.__mro__)
            if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
            for name, member in vars(each).items()
            if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
            if inspect.isfunction(member)
        }
        members: dict[str, Any] = {name: in_float32(member) for name, member in names.items()}
        members["state"] = attribute_with_checkpoint_view("state", own_class)
        return members

    def __repr__(self) -> str:
        count = sum(map(needs_master, params_of(self)))
        said: str = own(self, MasterWeights).__repr__()
        return f"{said} with float32 masters of {counted(count, 'parameter')} in 16 bits"

    # --- The step.

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take one step of the optimizer with masters.

        Args:
            closure: What computes a loss, as of the optimizer's own step [None].
            args: Other arguments of it.
            kwargs: Other arguments of it.

        Returns:
            What the optimizer's own step returns; None if it was skipped.

        Raises:
            RuntimeError: The gradient of a 16-bit parameter is sparse, or a closure was given
                inside a GradScaler.
        """
        name = type(self).__name__
        with dropping_amp_tensors(self):
            step = step_call.scaled_step(name, self, None, None, 1.0, None)
            groups = None if self._equivalent is None else self._equivalent.groups_of(self)
            if closure is not None and (step.check or step.found_inf is not None):
                raise RuntimeError(f"{name}.step: no closure can be given inside a GradScaler")
            if self._equivalent is not None and groups is not None:
                value = None
                if closure is not None:
                    with torch.enable_grad():
                        value = closure()
                engine = self._equivalent.engine_for(self)
                with torch.no_grad():
                    step.result = engine.step(self, groups, step)
                return value
            return self.__step_own(step, closure, *args, **kwargs)

    def __step_own(
        self, step: ScaledStep, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Step by the optimizer's own class."""
        if self._equivalent is not None:
            self._equivalent.step_own(self)
        if any(group.get("differentiable") for group in self.param_groups):
            return self.__step_alone(step, closure, *args, **kwargs)
        self._own_masters.begin_step()
        if closure is not None:
            return self.__step_with(closure, *args, **kwargs)
        grads = self.__grads()
        found, new = self._float32_grads.of(grads, step, self.__name)
        step.result = result_of(grads, found, step)
        if step.result.outcome.found_inf:
            return None
        masters = self._masters_for_step(new)
        with self.__stepping(grads), exchanged(masters, new):
            value = own(self, MasterWeights).step(*args, **kwargs)
        self._write_masters(masters)
        return value

    step.takes_scaled_step = True  # type: ignore[attr-defined]
    # The optimizer's own step runs the hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def __step_alone(self, step: ScaledStep, *args: Any, **kwargs: Any) -> Any:
        """Step without masters, which keep no graph."""
        name = type(self).__name__
        if step.check or step.found_inf is not None:
            raise RuntimeError(
                f"{name}.step: differentiable is True, and gradients are scaled; it must be False "
                "inside a GradScaler"
            )
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"MasterWeights: {name} is differentiable, and masters would cut the graph through "
                "its step, so it steps 16-bit weights without them. Use float32 weights",
                "updates-are-lost",
            )
        return own(self, MasterWeights).step(*args, **kwargs)

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

        with exchange.ending(), self.__stepping(self.__grads()):
            with torch.no_grad():
                enter()
            value = own(self, MasterWeights).step(with_weights, *args, **kwargs)
        self._write_masters(masters)
        return value

    @contextlib.contextmanager
    def __stepping(self, grads: Grads) -> Iterator[None]:
        """A context for the optimizer's own step, in which torch's fused ones do not unscale."""
        attributes = vars(self)
        names = ("grad_scale", "found_inf", "scaled_step")
        hidden = {name: attributes[name] for name in names if name in attributes}
        try:
            for name in hidden:
                del attributes[name]
            self._steps_masters = True
            yield
        except RuntimeError as error:
            with_graph = [
                p for p in grads.slots.params if (g := p.grad) is not None and g.requires_grad
            ]
            if not any(needs_master(param) for param in with_graph):
                raise
            raise RuntimeError(
                f"MasterWeights: {type(self).__name__}.step ended with an error, see above. The "
                f"gradient of {self.__name(with_graph[0])} has a graph, as by "
                "backward(create_graph=True), and the float32 copy that the step is given has none;"
                " optimizers that differentiate gradients need float32 weights"
            ) from error
        finally:
            self._steps_masters = False
            attributes.update(hidden)

    def _masters_for_step(self, grads: Collection[Tensor] = ()) -> dict[Tensor, Tensor]:
        """Return the masters for a step."""
        self._own_masters.put_back(self)
        self._own_masters.put_aside(self)
        low = [param for param in self.__params() if needs_master(param)]
        states = vars(self).get("state", {})
        params = [param for param in low if param.requires_grad or param in grads]
        for param in params:
            if param not in self._own_masters.kept and param in states:  # Made in 16 bits.
                state = states[param]
                state.update({key: widened(value) for key, value in state.items()})
        return self._own_masters.whole(params)

    def _write_masters(self, masters: dict[Tensor, Tensor]) -> None:
        is_split = self._settings.kind == "split"
        if not is_split:  # Else the weight is one part of the master.
            Exchange(masters, {}).copy_to_weights()
        self._own_masters.keep(masters, as_remainders=is_split)
        self._own_masters.end_step()

    # --- Gradients.

    def __grads(self) -> Grads:
        if self._slots is None or not self._slots.fits(self.param_groups):
            self._slots = GradSlots(self.param_groups)
        return self._slots.read()

    def check_gradients(self, step: ScaledStep) -> GradCheck:
        """Check and measure gradients for a step that GradScaler takes later.

        Args:
            step: That step; it has the scale.

        Returns:
            What was found; gradients stay as they are.

        Raises:
            RuntimeError: A gradient is sparse, or on a device without kernels.
        """
        groups = None if self._equivalent is None else self._equivalent.groups_of(self)
        if self._equivalent is not None and groups is not None:
            return self._equivalent.engine_for(self).check_gradients(self, groups, step)
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

        If it has another layout than torch's, masters are a list, `master_param`, in the order of
        parameters. Hooks of the user's are called before masters are added.
        """
        self._own_masters.put_back(self)
        if self._equivalent is not None:
            self._equivalent.leave(self)
        saved: dict[str, Any] = own(self, MasterWeights).state_dict()
        params = self.__params()
        if not _is_torchs(saved):
            masters = [self._own_masters.saved(param) for param in params]
            return {**saved, MASTER: masters} if isinstance(saved, dict) else saved
        numbers = itertools.chain.from_iterable(g["params"] for g in saved["param_groups"])
        states = saved["state"]
        for param, number in dict(zip(params, numbers, strict=True)).items():
            master = self._own_masters.saved(param)
            # Without need none: the class alone could not load a state that lacks its entries.
            if master is not None and (number in states or not self._own_masters.is_weight(param)):
                states[number] = {**states.get(number, {}), MASTER: master}
        return saved

    def __params(self) -> list[Tensor]:
        return params_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this optimizer, or of one of its class without masters.

        Masters that it lacks are made from the weights; so are those that torch, loading this state
        without MasterWeights, has cast to 16 bits.

        Args:
            state_dict: What `state_dict` of such an optimizer returned.
        """
        saved = as_dict(type(self).__name__, state_dict)
        params, found = self.__params(), dict[Tensor, Any]()
        if not _is_torchs(saved):
            found = dict(zip(params, saved.pop(MASTER, ()), strict=False))
        else:
            states, masters = dict[Any, Any](), dict[Any, Any]()
            for key, state in saved["state"].items():
                if isinstance(state, Mapping) and MASTER in state:
                    masters[key] = state[MASTER]
                    state = {name: value for name, value in state.items() if name != MASTER}
                    if not state:
                        continue
                states[key] = state
            saved["state"] = states
            keys = itertools.chain.from_iterable(g["params"] for g in saved["param_groups"])
            found = {param: masters.get(key) for param, key in zip(params, keys, strict=False)}
        loaded = {
            param: master.to(param.device, torch.float32, copy=True)
            for param, master in found.items()
            if getattr(master, "dtype", None) == torch.float32 and needs_master(param)
        }
        # torch casts state to the dtype of its parameter.
        wide = {p: loaded.get(p, p.detach().float()) for p in params if needs_master(p)}
        with torch.no_grad(), exchanged(wide, {}):
            own(self, MasterWeights).load_state_dict(saved)
        self._own_masters.load(loaded)
        self.__make_equivalent()

    def __make_equivalent(self) -> None:
        kind = self._settings.kind
        self._equivalent = Equivalent(self, kind) if self._settings.by_rule else None

    def _copied(self) -> Any:
        self._own_masters.put_back(self)
        if self._equivalent is not None:
            self._equivalent.leave(self)
        return [*self._own_masters.kept.items()], self._settings

    def _restore(self, copied: Any) -> None:
        kept, settings = copied
        self._install(settings)
        self._own_masters.load(dict(kept))

    def _install(self, settings: Settings) -> None:
        self._own_masters = MasterStore()
        if zero_group() is None:  # Else each process has other parameters.
            parallel_masters.add_optimizer(self)
        self._settings = settings
        self._float32_grads = Float32Grads(settings.keep_grads)
        self.__make_equivalent()


def _is_torchs(saved: Any) -> bool:
    """Return whether an optimizer's state_dict has the layout of torch's."""
    return isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()


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
            f"MasterWeights: optimizer_class is {_shown(cls)}; it must be a class of optimizers, "
            "such as torch.optim.Muon, whose options follow it"
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
    if lies_in_buckets(given):
        raise ValueError(
            f"MasterWeights: parameters_as_bucket_view of this {cls.__name__} is True, so that a "
            "master in a parameter's place would not be sent to other processes; it must be False. "
            "Or give it a fused optimizer of apex_mp as optimizer_class"
        )
    if given is None:
        params = listed(params)
        # Some make state in the constructor, in the dtype of the parameters.
        with torch.no_grad(), exchanged({p: p.detach().float() for p in low_params(params)}, {}):
            optimizer: Any = cls(params, **options)
    else:
        optimizer = given
    return give_masters(optimizer, Settings(master_weights, keep_grads))


def _shown(given: Any) -> str:
    kind = type(given).__name__
    return f"an object, of {kind}" if isinstance(given, torch.optim.Optimizer) else repr(given)


def give_masters(optimizer: Any, settings: Settings) -> Any:
    """Give masters to an optimizer in place, and return it."""
    for param in params_of(optimizer):
        if param.is_floating_point() and param.itemsize == 1:
            raise TypeError(
                f"MasterWeights: a parameter is of {param.dtype}; it must be float16, bfloat16, "
                "float32 or float64"
            )
    attach(optimizer, MasterWeights)
    optimizer._install(settings)
    return optimizer


def lies_in_buckets(optimizer: Any) -> bool:
    """Return whether it is a ZeroRedundancyOptimizer that sends parameters as parts of buckets.

    A master that is put into such a parameter is not sent. Its constructor says so last, so that
    one that is not complete counts as such.
    """
    is_zero = any(each.__module__ == ZERO for each in type(optimizer).__mro__)
    return is_zero and getattr(optimizer, "parameters_as_bucket_view", True)


def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of an optimizer that finds parameters and gradients in float32."""

    @functools.wraps(method)
    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        low = [p for g in optimizer.param_groups for p in g["params"] if needs_master(p)]
        if not low:  # It is called by one that has put masters in place.
            return method(optimizer, *args, **kwargs)
        with torch.no_grad():
            given = [(param, param.grad) for param in low]
            grads = {param: grad.float() for param, grad in given if grad is not None}
            masters = optimizer._masters_for_step(grads)
        with exchanged(masters, grads):
            result = method(optimizer, *args, **kwargs)
        with torch.no_grad():
            optimizer._write_masters(masters)
        return result

    return call
