"""Scripts of today whose weights have 16 bits: masters for their optimizers, and our GradScaler."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from apex_mp._run.replacements import Replacements
from apex_mp.amp import GradScaler as OurGradScaler
from apex_mp.core.log import counted, is_first_process
from apex_mp.core.masters.store import MASTER, needs_master
from apex_mp.core.step import step_log
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers._in_place import fuse
from apex_mp.optimizers.master_weights import MasterWeights, StepCounts, give_masters


@contextlib.contextmanager
def use_master_weights() -> Iterator[None]:
    """Train 16-bit weights as they are written today, without an edit where they are trained.

        with apex_mp.use_master_weights():
            main()

    While the block runs, `torch.amp.GradScaler` and those of `torch.cuda.amp` and `torch.cpu.amp`
    are `apex_mp.amp.GradScaler`, which takes float16 gradients; and each optimizer that is made
    there gets float32 masters as by `apex_mp.optimizers.MasterWeights` if parameters have 16 bits,
    or once they do: masters of a model that becomes 16-bit later hold its float32 weights. At the
    end of the process a line on stderr says what was done.

    Optimizers that keep masters themselves, ours or those of DeepSpeed and Megatron, whose
    parameters are float32, stay as they are. So do checkpoints: torch's optimizers load them.

    It is what `python -m apex_mp run --master-weights` does to a script.
    """
    if _givers:  # This block is inside of another.
        yield
        return
    replacements = Replacements()
    give_everywhere(replacements, says_nothing_found=True)
    try:
        yield
    finally:
        replacements.undo()


def give_everywhere(replacements: Replacements, *, says_nothing_found: bool) -> None:
    """Replace torch's scalers, and what makes and steps optimizers and casts modules.

    Args:
        replacements: Undone by its `undo`, which prints what was done, as the end of the process.
        says_nothing_found: Print a line, too, if no optimizer had 16-bit parameters.
    """
    giver = _Giver(says_nothing_found)
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
    hook = optimizer.profile_hook_step
    replacements.set(optimizer, "profile_hook_step", staticmethod(giver.around_step(hook)))
    for each in {*_hooked(optimizer)}:  # Classes of optimizers that were made before.
        replacements.set(each, "step", giver.instead_of(each.step))
    replacements.set(nn.Module, "_apply", giver.around_apply(nn.Module._apply))
    atexit.register(giver.report)
    replacements.at_undo(giver.report)
    replacements.at_undo(lambda: atexit.unregister(giver.report))


def _say(what: str) -> None:
    if is_first_process():
        print(f"apex_mp: {what}", file=sys.stderr)


class _Giver:
    """Gives masters to the optimizers of a script, and counts them."""

    def __init__(self, says_nothing_found: bool) -> None:
        self._says_nothing_found = says_nothing_found
        self._counts: list[StepCounts] = []
        self._counters: MutableMapping[Any, _Counter] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._originals: MutableMapping[Tensor, Tensor]  # float32 values by parameter
        self._originals = WeakIdKeyDictionary()
        self._is_applying = False

    def give(self, optimizer: Any) -> None:
        """Give masters to an optimizer that has 16-bit parameters and keeps none itself."""
        if optimizer not in self._optimizers:
            return
        low = _low_params(optimizer)
        if not low:
            return
        name = type(optimizer).__name__
        if not isinstance(optimizer, (MasterWeights, FusedOptimizer)):
            try:
                _give_masters(optimizer)
            except TypeError as error:
                self._optimizers.discard(optimizer)
                _say(f"{name} stays without masters. {error}")
                return
        self._count(optimizer)
        originals = {p: self._originals.pop(p) for p in low if p in self._originals}
        if originals:
            optimizer._own_masters.kept.update(originals)
            _say(
                f"the weights of {name} became 16-bit after it was made; its masters hold the "
                "float32 weights"
            )

    def _count(self, optimizer: Any) -> None:
        """Count the steps of an optimizer from now on."""
        counter = self._counters.get(optimizer)
        if isinstance(optimizer, MasterWeights):
            if counter is not None:
                counter.leave_to(optimizer)
            counts = optimizer._counts
        else:
            if counter is None:
                counter = self._counters[optimizer] = _Counter(optimizer)
            counts = counter.counts
        if not any(counts is each for each in self._counts):
            self._counts.append(counts)

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
            if is_new and isinstance(optimizer, (MasterWeights, FusedOptimizer)):
                self.give(optimizer)

        return __setstate__

    def _adopt(self, optimizer: Any) -> None:
        """Note an optimizer that was made here, and ask for masters of a fused one."""
        if isinstance(optimizer, FusedOptimizer):
            for each in (optimizer.defaults, *optimizer.param_groups):
                each["master_weights"] = each.get("master_weights") or True
        if not isinstance(optimizer, FP16_Optimizer):
            self._optimizers.add(optimizer)

    def before_load(self, load: Callable[..., None]) -> Callable[..., None]:
        """Give masters before a state with masters is loaded, if all parameters are frozen now."""

        @functools.wraps(load)
        def load_state_dict(optimizer: Any, state_dict: Any) -> None:
            is_plain = not isinstance(optimizer, (MasterWeights, FusedOptimizer))
            if is_plain and optimizer in self._optimizers and _has_masters(state_dict):
                _give_masters(optimizer)
                self._count(optimizer)
                optimizer.load_state_dict(state_dict)
                return
            load(optimizer, state_dict)

        return load_state_dict

    def around_step(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function: self.instead_of(hook(function))

    def instead_of(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a class's step that is the one with masters once the optimizer has some.

        Schedulers and accelerate keep this function, and call it later.
        """

        @functools.wraps(own)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.give(optimizer)
            if isinstance(optimizer, MasterWeights) and not optimizer._steps_masters:
                return MasterWeights.step(optimizer, *args, **kwargs)
            if isinstance(optimizer, FusedOptimizer) and not hasattr(own, "takes_scaled_step"):
                return type(optimizer).step(optimizer, *args, **kwargs)  # It was torch's.
            return own(optimizer, *args, **kwargs)

        return step

    def around_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the float32 values of an optimizer's parameters that become 16-bit."""

        @functools.wraps(apply)
        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_applying or not self._optimizers:
                return apply(module, *args, **kwargs)
            self._is_applying = True
            try:
                stepped = {
                    id(param)
                    for optimizer in self._optimizers
                    for group in optimizer.param_groups
                    for param in group["params"]
                }
                before = {
                    param: param.detach()
                    for param in module.parameters()
                    if param.dtype == torch.float32 and id(param) in stepped
                }
                result = apply(module, *args, **kwargs)
                cast: dict[Tensor, Tensor]
                cast = {p: value.to(p.device) for p, value in before.items() if needs_master(p)}
                self._originals.update(cast)
            finally:
                self._is_applying = False
            for optimizer in [*self._optimizers] if cast else ():
                self.give(optimizer)
            return result

        return _apply

    def report(self) -> None:
        """Print what was done, once."""
        counts, self._counts = [each for each in self._counts if each.steps and each.params], []
        if not counts and self._says_nothing_found:
            _say("no optimizer was given masters; none that was made here had 16-bit parameters")
        for each in counts:
            _say(
                f"{each.owner} stepped float32 masters of {counted(each.params, 'parameter')} in "
                f"16 bits ({each.elements * each.bytes_each:,} bytes); "
                f"{each.skipped:,} of {counted(each.steps, 'step')} skipped"
            )


def _low_params(optimizer: Any) -> list[Tensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param for param in params if needs_master(param) and param.requires_grad]


def _has_masters(state_dict: Any) -> bool:
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    return isinstance(states, dict) and any(MASTER in (state or ()) for state in states.values())


def _give_masters(optimizer: Any) -> None:
    """Give masters to an optimizer.

    Raises:
        TypeError: Its class cannot be changed.
    """
    if not fuse(optimizer):
        give_masters(optimizer)
    # Lightning refuses to clip gradients of an optimizer for which this is true; the scaler is
    # ours, which does not ask.
    optimizer._step_supports_amp_scaling = False


class _Counter:
    """Counts the steps of a fused optimizer, and those that are skipped, as a listener."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        is_split = optimizer.param_groups[0]["master_weights"] != "float32"
        self.counts = StepCounts(type(optimizer).__name__, bytes_each=2 if is_split else 4)
        self._is_over = False
        optimizer.register_step_post_hook(self)
        step_log.listen(optimizer, self)

    def leave_to(self, optimizer: MasterWeights) -> None:
        """Leave counting to the optimizer, which was fused until now and counts by itself."""
        if optimizer._counts is not self.counts:
            self._is_over = True  # In a hook no hook can be removed.
            step_log.unlisten(self)
            self.counts.steps += optimizer._counts.steps
            optimizer._counts = self.counts

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, MasterWeights):
            self.leave_to(optimizer)
        if self._is_over:
            return
        self.counts.steps += 1
        low = _low_params(optimizer)
        if self.counts.params != len(low):
            self.counts.params, self.counts.elements = len(low), sum(map(torch.numel, low))

    def before_step(self, *_: Any) -> None:
        """Do nothing."""

    def note(self, **_: Any) -> None:
        """Do nothing."""

    def withdraw_step(self) -> None:
        """Do nothing."""

    def after_step(self, note: step_log.StepNote) -> None:
        """Count a step that was skipped."""
        self.counts.skipped += note.skipped


def _hooked(kind: Any) -> Iterator[Any]:
    """Yield the subclasses whose step torch has wrapped, but for those that keep masters."""
    for each in kind.__subclasses__():
        step = vars(each).get("step")
        if getattr(step, "hooked", False) and not getattr(step, "takes_scaled_step", False):
            yield each
        yield from _hooked(each)


class GradScaler(OurGradScaler):
    """The scaler of a script, which gives masters to the optimizers that it meets."""

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
