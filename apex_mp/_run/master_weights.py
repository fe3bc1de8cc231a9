"""Scripts of today whose weights have 16 bits: masters for their optimizers, and our GradScaler."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from apex_mp._run.replacements import Replacements
from apex_mp.amp import GradScaler as OurGradScaler
from apex_mp.averaged_masters import Values
from apex_mp.core.log import counted, is_first_process
from apex_mp.core.tensors import params_of
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.masters.exchange import Exchange, exchanged
from apex_mp.masters.store import MASTER, MasterStore, StateView, StepCounts, needs_master
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers.master_weights import (
    MasterWeights,
    Settings,
    give_masters,
    lies_in_buckets,
)
from apex_mp.step import step_log

# The exit status of `run --strict` if a 16-bit parameter was stepped without a master.
NOT_ALL_HAD_MASTERS = 3
# Packages of optimizers that only pass on the step of another one, with its gradients perhaps.
_PASS_ON = ("accelerate", "apex_mp", "opacus")


@contextlib.contextmanager
def use_master_weights(
    master_weights: bool | Literal["split", "float32"] = True,
) -> Iterator[None]:
    """Train 16-bit weights as they are written today, without an edit where they are trained.

        with apex_mp.use_master_weights():
            main()

    While the block runs, `torch.amp.GradScaler` and those of `torch.cuda.amp` and `torch.cpu.amp`
    are `apex_mp.amp.GradScaler`, which takes float16 gradients; and each optimizer that is made
    there gets float32 masters as by `apex_mp.optimizers.MasterWeights` if parameters have 16 bits,
    or once they do: masters of a model that becomes 16-bit later hold its float32 weights. A
    `torch.optim.swa_utils.AveragedModel` averages masters. At the end of the block lines on stderr
    say what was done.

    Optimizers that keep masters themselves, ours or those of DeepSpeed and Megatron, whose
    parameters are float32, stay as they are. So do checkpoints: torch's optimizers load them.

    It is what `python -m apex_mp run --master-weights` does to a script.

    Args:
        master_weights: "float32" keeps whole masters; True or "split" what weights do not hold of
            them, where the step is fused [True].

    Raises:
        ValueError: `master_weights` is something else.
    """
    if master_weights is not True and master_weights not in ("split", "float32"):
        raise ValueError(
            f"use_master_weights: master_weights is {master_weights!r}; it must be True, 'split' "
            "or 'float32'"
        )
    if _givers:  # This block is inside of another.
        yield
        return
    replacements = Replacements()
    give_everywhere(replacements, Giving(master_weights))
    try:
        yield
    finally:
        replacements.undo()


@dataclasses.dataclass(frozen=True)
class Giving:
    """How masters are given.

    Attributes:
        kind: `master_weights` of the optimizers.
        init_scale: The first scale of each GradScaler; None: the script's.
        strict: End the process with `NOT_ALL_HAD_MASTERS` if a parameter had none.
        says_nothing_found: Print a line, too, if no optimizer had 16-bit parameters.
    """

    kind: bool | str = True
    init_scale: float | None = None
    strict: bool = False
    says_nothing_found: bool = True


def give_everywhere(replacements: Replacements, giving: Giving) -> None:
    """Replace torch's scalers, and what makes and steps optimizers and casts modules."""
    giver = _Giver(giving)
    _givers.append(giver)
    replacements.at_undo(lambda: _givers.remove(giver))
    for package, ours in (
        (torch.amp, GradScaler),
        (torch.cuda.amp, CudaGradScaler),
        (torch.cpu.amp, CpuGradScaler),
    ):
        theirs = package.GradScaler
        replacements.set(theirs, "__init__", _as(ours, theirs))
        for module in (package, package.grad_scaler):
            replacements.set(module, "GradScaler", ours)  # For subclasses.
    optimizer = torch.optim.Optimizer
    replacements.set(optimizer, "__init__", giver.after_init(optimizer.__init__))
    replacements.set(optimizer, "__setstate__", giver.after_setstate(optimizer.__setstate__))
    replacements.set(optimizer, "load_state_dict", giver.before_load(optimizer.load_state_dict))
    replacements.set(MasterWeights, "_install", giver.after_install(MasterWeights._install))
    hook = optimizer.profile_hook_step
    replacements.set(optimizer, "profile_hook_step", staticmethod(giver.around_step(hook)))
    replacements.set(optimizer, "__init_subclass__", classmethod(giver.after_class))
    for each in {*_subclasses(optimizer)}:  # Those that were made before.
        giver.around_members(each, functools.partial(replacements.set, each))
    replacements.set(nn.Module, "_apply", giver.around_apply(nn.Module._apply))
    update = AveragedModel.update_parameters
    replacements.set(AveragedModel, "update_parameters", giver.around_average(update))
    view = _before_view(StateView.state, replacements)
    replacements.set(StateView, "state", view)
    atexit.register(giver.end)
    replacements.at_undo(giver.report)
    replacements.at_undo(lambda: atexit.unregister(giver.end))


def _say(what: str) -> None:
    if is_first_process():
        print(f"apex_mp: {what}", file=sys.stderr)


class _Skips:
    """Counts the steps of an optimizer under a scaler, and those that were skipped; a listener."""

    def __init__(self) -> None:
        self.scaled = self.skipped = 0

    def before_step(self, *_: Any) -> None:
        """Do nothing."""

    def note(self, **_: Any) -> None:
        """Do nothing."""

    def withdraw_step(self) -> None:
        """Do nothing."""

    def after_step(self, note: step_log.StepNote) -> None:
        self.scaled += 1
        self.skipped += note.skipped


class _Giver:
    """Gives masters to the optimizers of a script, and says at the end what became of them."""

    def __init__(self, giving: Giving) -> None:
        self._giving = giving
        self.init_scale = giving.init_scale
        self._given: list[tuple[str, StepCounts, _Skips]] = []  # to classes of these names
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        # Optimizers that step 16-bit parameters without masters, and by class how many of these.
        self._without: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lost: dict[str, int] = defaultdict(int)
        self._averages: MutableMapping[Any, MasterStore] = weakref.WeakKeyDictionary()
        self._is_applying = False

    # --- Masters for an optimizer.

    def give(self, optimizer: Any) -> None:
        """Give masters to an optimizer that has 16-bit parameters and keeps none itself."""
        store = vars(optimizer).get("_own_masters")
        has_masters = store is not None and store.counts.written is not None
        if not has_masters and optimizer in self._optimizers and _low_params(optimizer):
            self._add_masters(optimizer)

    def _add_masters(self, optimizer: Any) -> None:
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return
        if lies_in_buckets(optimizer):  # The optimizer inside gets the masters of its part.
            return
        if not isinstance(optimizer, (MasterWeights, FusedOptimizer)):
            give_masters(optimizer, Settings(self._giving.kind, by_rule=True))
            # Lightning refuses to clip gradients of an optimizer for which this is true; the scaler
            # is ours, which does not ask.
            optimizer._step_supports_amp_scaling = False
        self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        counts = optimizer._own_masters.counts
        if counts.written is None:
            counts.written = 0
            skips = _Skips()
            step_log.listen(optimizer, skips)
            self._given.append((type(optimizer).__name__, counts, skips))

    def after_install(self, install: Callable[..., None]) -> Callable[..., None]:
        """Count the steps of an optimizer that gets masters, copies included."""

        @functools.wraps(install)
        def _install(optimizer: Any, *args: Any) -> None:
            install(optimizer, *args)
            self._count(optimizer)

        return _install

    def _adopt(self, optimizer: Any) -> None:
        """Note an optimizer that was made here, and ask for masters of a fused one."""
        if isinstance(optimizer, FusedOptimizer):
            for each in (optimizer.defaults, *optimizer.param_groups):
                each["master_weights"] = each.get("master_weights") or self._giving.kind
        if not isinstance(optimizer, FP16_Optimizer):
            self._optimizers.add(optimizer)

    def after_init(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def initialize(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._adopt(optimizer)
            self.give(optimizer)

        return initialize

    def after_setstate(self, setstate: Callable[..., None]) -> Callable[..., None]:
        """Adopt copies, too; those without masters get some before their next step."""

        @functools.wraps(setstate)
        def __setstate__(optimizer: Any, state: Any) -> None:  # noqa: N807
            is_new = "param_groups" not in vars(optimizer)  # Else load_state_dict calls this.
            setstate(optimizer, state)
            if is_new:
                self._adopt(optimizer)
            if is_new and isinstance(optimizer, FusedOptimizer):
                self.give(optimizer)

        return __setstate__

    def before_load(self, load: Callable[..., None]) -> Callable[..., None]:
        """Give masters before a state with masters is loaded, if all parameters are frozen now."""

        @functools.wraps(load)
        def load_state_dict(optimizer: Any, state_dict: Any) -> None:
            is_plain = not isinstance(optimizer, (MasterWeights, FusedOptimizer))
            if is_plain and optimizer in self._optimizers and _has_masters(state_dict):
                self._add_masters(optimizer)
                optimizer.load_state_dict(state_dict)
                return
            load(optimizer, state_dict)

        return load_state_dict

    # --- Steps.

    def around_step(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function: self.instead_of(hook(function))

    def after_class(self, cls: Any, /, **kwargs: Any) -> None:
        """Wrap what a new class has of its own; its constructor may not call torch's."""
        after: Any = super(torch.optim.Optimizer, cls)
        after.__init_subclass__(**kwargs)
        self.around_members(cls, functools.partial(setattr, cls))

    def around_members(self, cls: Any, put: Callable[[str, Any], object]) -> None:
        own = vars(cls)
        if "_addition" in own or _takes_scaled_step(own.get("step")):
            return
        if inspect.isfunction(own.get("step")):
            put("step", self.instead_of(own["step"]))
        if "__init__" in own:
            put("__init__", _in_float32_of_another(own["__init__"]))

    def instead_of(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a class's step that is the one with masters once the optimizer has some.

        Schedulers and accelerate keep this function, and call it later.
        """

        @functools.wraps(own)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self in _givers:
                if not _is_torchs(optimizer) and not _passes_on(optimizer):
                    self._adopt(optimizer)
                self.give(optimizer)
            if isinstance(optimizer, MasterWeights) and not optimizer._steps_masters:
                return type(optimizer).step(optimizer, *args, **kwargs)
            if self in _givers and not isinstance(optimizer, (MasterWeights, FusedOptimizer)):
                self._note_without(optimizer)
            return own(optimizer, *args, **kwargs)

        return step

    def _note_without(self, optimizer: Any) -> None:
        """Note the 16-bit parameters that an optimizer is about to step without masters."""
        if _passes_on(optimizer) or isinstance(optimizer, FP16_Optimizer):
            return
        params = params_of(optimizer)
        count = sum(needs_master(param) and param.grad is not None for param in params)
        if count and optimizer not in self._without:
            self._without.add(optimizer)
            self._lost[type(optimizer).__name__] += count

    # --- Models.

    def around_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the float32 values of an optimizer's parameters that become 16-bit."""

        @functools.wraps(apply)
        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_applying or not self._optimizers:
                return apply(module, *args, **kwargs)
            self._is_applying = True
            try:
                own = {id(param) for param in module.parameters() if param.dtype == torch.float32}
                before = [
                    (optimizer, param, param.detach())
                    for optimizer in self._optimizers
                    for group in optimizer.param_groups
                    for param in group["params"]
                    if id(param) in own
                ]
                result = apply(module, *args, **kwargs)
            finally:
                self._is_applying = False
            cast = [each for each in before if needs_master(each[1])]
            for optimizer in {id(optimizer): optimizer for optimizer, _, _ in cast}.values():
                self._add_masters(optimizer)
                if not isinstance(optimizer, (MasterWeights, FusedOptimizer)):
                    continue
                pairs = [(param, value) for of, param, value in cast if of is optimizer]
                new = [_put_original(optimizer._own_masters, *pair) for pair in pairs]
                if any(new):
                    _say(
                        f"the weights of {type(optimizer).__name__} became 16-bit after it was "
                        "made; its masters hold the float32 weights"
                    )
            return result

        return _apply

    def around_average(self, update: Callable[..., None]) -> Callable[..., None]:
        """Average the masters of a 16-bit model in float32; the averaged model has them rounded."""

        @functools.wraps(update)
        def update_parameters(averaged: AveragedModel, model: nn.Module) -> None:
            masters = {
                id(param): optimizer._own_masters.whole_of(param)
                for optimizer in self._optimizers
                if isinstance(optimizer, (MasterWeights, FusedOptimizer))
                for group in optimizer.param_groups
                for param in group["params"]
                if needs_master(param)
            }
            low = [param for param in averaged.module.parameters() if needs_master(param)]
            if not low or not any(id(param) in masters for param in model.parameters()):
                update(averaged, model)
                return
            store = self._averages.setdefault(averaged, MasterStore())
            wide = store.whole(low)
            exchange = Exchange(wide, {})
            with torch.no_grad(), exchange.ending():
                exchange.enter()
                update(averaged, Values(model, masters))
            exchange.copy_to_weights()
            store.keep(wide, as_remainders=False)

        return update_parameters

    # --- The end.

    def end(self) -> None:
        """Report, and end the process with another status if it is to be strict."""
        is_complete = not self._lost
        self.report()
        if self._giving.strict and not is_complete:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(NOT_ALL_HAD_MASTERS)

    def report(self) -> None:
        """Print what was done, once."""
        given, self._given = self._given, []
        lost, self._lost = self._lost, defaultdict(int)
        for name in {name: None for name, _, _ in given}:
            of_name = [(counts, skips) for owner, counts, skips in given if owner == name]
            stepped = [(counts, skips) for counts, skips in of_name if counts.params]
            if stepped:
                _say(_line(name, stepped))
            elif not any(counts.steps for counts, _ in of_name):
                _say(f"{name} has float32 masters, and took no step")
        for name, count in lost.items():
            _say(f"{name} stepped {counted(count, 'parameter')} in 16 bits without masters")
        if not given and not lost and self._giving.says_nothing_found:
            _say("no optimizer was given masters; none that was made here had 16-bit parameters")


def _line(name: str, stepped: list[tuple[StepCounts, _Skips]]) -> str:
    """Return what became of the optimizers of a class."""
    params, nbytes, steps, written = (
        sum(getattr(counts, of) or 0 for counts, _ in stepped)
        for of in ("params", "nbytes", "steps", "written")
    )
    skipped = sum(skips.skipped for _, skips in stepped)
    many = f"{len(stepped)} optimizers of {name}" if len(stepped) > 1 else name
    if any(skips.scaled for _, skips in stepped):
        outcome = f"{skipped:,} of {counted(steps, 'step')} skipped"
    else:
        outcome = f"{counted(steps, 'step')} without a scaler"
    line = (
        f"{many} stepped float32 masters of {counted(params, 'parameter')} in 16 bits "
        f"({nbytes:,} bytes); {outcome}"
    )
    if written:
        line += f"; before {written:,} of them weights were written outside"
    return line


def _put_original(masters: MasterStore, param: Tensor, value: Tensor) -> bool:
    """Make a float32 value the master of a parameter that was cast; return whether it says more.

    Where it says no more than the weight, as after `model.float()`, an earlier master stays.
    """
    value = value.to(param.device)
    is_weight = value == param.detach().float()
    if bool(is_weight.all()):
        return False
    masters.kept[param] = torch.where(is_weight, masters.whole_of(param), value)
    return True


def _low_params(optimizer: Any) -> list[Tensor]:
    params = params_of(optimizer)
    return [param for param in params if needs_master(param) and param.requires_grad]


def _has_masters(state_dict: Any) -> bool:
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    return isinstance(states, dict) and any(MASTER in (state or ()) for state in states.values())


def _passes_on(optimizer: Any) -> bool:
    package = type(optimizer).__module__.partition(".")[0]
    return package in _PASS_ON or lies_in_buckets(optimizer)


def _is_torchs(optimizer: Any) -> bool:
    """Return whether torch's constructor has made it, which one around another may not call."""
    return "_zero_grad_profile_name" in vars(optimizer)


def _takes_scaled_step(step: Any) -> bool:
    return getattr(step, "takes_scaled_step", False)


def _in_float32_of_another(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that meets the parameters of an optimizer that it is given in float32.

    One around another optimizer may copy them, as Lookahead does.
    """

    @functools.wraps(init)
    def initialize(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        others = [each for each in (*args, *kwargs.values()) if isinstance(each, MasterWeights)]
        low = [] if _passes_on(optimizer) else [p for each in others for p in _low_params(each)]
        with exchanged({param: param.detach().float() for param in low}, {}):
            init(optimizer, *args, **kwargs)

    return initialize


def _before_view(state: Callable[..., Any], replacements: Replacements) -> Callable[..., Any]:
    """Have torch.distributed.checkpoint load files that lack masters, once it is imported."""
    is_set = False

    @functools.wraps(state)
    def view(of: StateView) -> Any:
        nonlocal is_set
        if not is_set:
            is_set = True
            planner = sys.modules["torch.distributed.checkpoint.default_planner"].DefaultLoadPlanner
            plan = _without_missing_masters(planner.create_local_plan)
            replacements.set(planner, "create_local_plan", plan)
        return state(of)

    return view


def _without_missing_masters(plan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plan)
    def create_local_plan(planner: Any) -> Any:
        there = planner.metadata.state_dict_metadata
        asked = planner.state_dict.items()
        planner.state_dict = {
            name: value
            for name, value in asked
            if name in there or name.rpartition(".")[2] != MASTER
        }
        return plan(planner)

    return create_local_plan


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


class GradScaler(OurGradScaler):
    """The scaler of a script, which gives masters to the optimizers that it meets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scale = next((giver.init_scale for giver in _givers if giver.init_scale), None)
        if scale is not None and self.is_enabled():
            self._init_scale = scale

    def unscale_(self, optimizer: Any) -> None:
        _give(optimizer)
        super().unscale_(optimizer)

    def clip_grad_norm_(self, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        _give(optimizer)
        return super().clip_grad_norm_(optimizer, *args, **kwargs)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        _give(optimizer)
        return super().step(optimizer, *args, **kwargs)


class CudaGradScaler(GradScaler):
    """With the arguments of torch.cuda.amp.GradScaler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class CpuGradScaler(GradScaler):
    """With the arguments of torch.cpu.amp.GradScaler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


def _as(ours: type[GradScaler], theirs: type) -> Callable[..., None]:
    """Return a constructor for torch's class, which a script may have imported already."""
    original = theirs.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def initialize(scaler: Any, *args: Any, **kwargs: Any) -> None:
        if type(scaler) is not theirs:
            original(scaler, *args, **kwargs)
            return
        scaler.__class__ = ours
        construct: Any = ours.__init__
        construct(scaler, *args, **kwargs)

    return initialize


# Those of the blocks of use_master_weights() that run now.
_givers: list[_Giver] = []


def _give(optimizer: Any) -> None:
    for giver in _givers:
        giver.give(optimizer)
