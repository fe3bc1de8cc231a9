"""Where casts are on: in the whole process, but for the engine, optimizers and data loading.

torch.autocast is made for a `with` block. Casts that last must also
- come on in threads started later, and stay off in DataLoader workers;
- be off while the autograd engine runs: a backward formula has the dtypes of its forward. Python
  code of the user's in backward has casts on, as it had;
- be off in an optimizer's step, and on in its closure;
- keep no cast of a weight from one call of a model to the next: somebody may have edited it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.data._utils import worker as data_worker

from apex_mp.amp.casting import Caster, Function
from apex_mp.amp.patching import Patches
from apex_mp.parallel import local_gradients

State = tuple[bool, torch.dtype, bool]


class _Thread(threading.local):
    """What one thread is in the midst of.

    Attributes:
        before: How autocast was before it was switched on in this thread; None if it was not.
        nesting: How deep torch's regions were nested then, ours included.
        is_in_module: Whether a module is being called.
        off: How many `with` blocks there are in which casts are off.
        regions: The user's regions of torch.autocast that were entered since.
        optimizer_steps: How many steps there are, one in another.
    """

    def __init__(self) -> None:
        self.before: State | None = None
        self.nesting = 0
        self.is_in_module = False
        self.off = 0
        self.regions: list[Any] = []
        self.optimizer_steps = 0


class Scopes:
    """Switches casts on and off at the borders of torch's parts.

    Args:
        caster: Whose casts.
        dtype: Their low precision.
        close_in_worker: Called in a DataLoader worker before anything else.
    """

    def __init__(
        self, caster: Caster, dtype: torch.dtype, close_in_worker: Callable[[], None]
    ) -> None:
        self._caster = caster
        self._device_type = caster.device_type
        self._dtype = dtype
        self._close_in_worker = close_in_worker
        self._thread = _Thread()
        self._backward_calls = 0  # under way, in any thread, with casts suspended
        self._lock = threading.Lock()  # guards that number
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._had_fastpath: bool | None = None

    # Opening and closing.

    def open(self, patches: Patches) -> None:
        """Switch casts on in this thread, and install what carries them on."""
        self._switch_on_here()
        if self._device_type == "cpu":
            # Attention's way in evaluation gives weights to a kernel uncast; torch itself does not
            # go it under CUDA's autocast.
            self._had_fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        node = torch.autograd.function.BackwardCFunction
        for owner, name, around in (
            (torch.nn.Module, "__call__", self._around_module_call),
            (torch.autograd, "_engine_run_backward", self._around_engine),
            (node, "apply", self._around_custom_backward),
            (node, "apply_boxed", self._around_custom_backward),
            (torch.amp.autocast_mode.autocast, "__enter__", self._around_enter),
            (torch.amp.autocast_mode.autocast, "__exit__", self._around_exit),
            (threading.Thread, "_bootstrap_inner", self._around_thread),
            (data_worker, "_worker_loop", self._around_worker),
            (torch.jit._script, "_script_impl", functools.partial(self._around_script, patches)),
        ):
            if hasattr(owner, name):  # Not every torch has all of them.
                patches.install(owner, name, around)
        for register, hook in (
            (torch_optimizer.register_optimizer_step_pre_hook, self._before_optimizer_step),
            (torch_optimizer.register_optimizer_step_post_hook, self._after_optimizer_step),
        ):
            self._hooks.append(register(hook))  # type: ignore[arg-type]

    def close(self) -> None:
        """Switch casts off; what was patched is the caller's to restore."""
        for hook in self._hooks:
            hook.remove()
        if self._had_fastpath is not None:
            torch.backends.mha.set_fastpath_enabled(self._had_fastpath)
        self.clear_cache()
        thread = self._thread
        self._has_left_region()
        if thread.before is None:
            return  # Another thread than that of open().
        (enabled, dtype, cache), thread.before = thread.before, None
        torch.autocast_decrement_nesting()
        # Regions of the user's go on as they are, and end in what was before us.
        ours = [region for region in thread.regions if region.device == self._device_type]
        if ours:
            ours[0].prev, ours[0].prev_fastdtype = enabled, dtype
        else:
            torch.set_autocast_enabled(self._device_type, enabled)
            torch.set_autocast_dtype(self._device_type, dtype)
        if thread.regions:
            thread.regions[0].prev_cache_enabled = cache
        else:
            torch.set_autocast_cache_enabled(cache)

    def _switch_on_here(self) -> None:
        self._thread.before = self._state()
        # Else any autocast region of the user's would empty the cache when it ends.
        self._thread.nesting = torch.autocast_increment_nesting()
        self._set_casts_on()

    def _state(self) -> State:
        device_type = self._device_type
        return (
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def _has_left_region(self) -> bool:
        """Whether a region in which init() was called has ended since: casts then are off."""
        thread, nesting = self._thread, _nesting()
        if not self._is_ours() or nesting >= thread.nesting:
            return False
        thread.before, thread.nesting = self._state(), nesting
        return True

    def _is_ours(self) -> bool:
        """Whether casts are on in this thread for good: close() ends that."""
        return self._thread.before is not None

    def _set_casts_on(self) -> None:
        torch.set_autocast_enabled(self._device_type, True)
        torch.set_autocast_dtype(self._device_type, self._dtype)
        torch.set_autocast_cache_enabled(self._thread.is_in_module and self._caster.enable_caching)

    def clear_cache(self) -> None:
        """Forget all casts of weights, torch's and ours."""
        self._caster.cache.clear()
        torch.clear_autocast_cache()

    def parameter_names(self) -> dict[int, str]:
        """Return names of the parameters of all models that were called, by id()."""
        named = {model: dict(model.named_parameters()) for model in [*self._models]}
        several = sum(map(bool, named.values())) > 1
        return {
            id(param): f"{type(model).__name__}.{name}" if several else name
            for model, params in named.items()
            for name, param in params.items()
        }

    @contextlib.contextmanager
    def casts_off(self) -> Iterator[None]:
        """Switch casts off in this thread for a `with` block."""
        thread = self._thread
        before = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, False)
        thread.off += 1
        try:
            yield
        finally:
            thread.off -= 1
            if self._caster.active:
                torch.set_autocast_enabled(self._device_type, before)

    @contextlib.contextmanager
    def _casts_on(self) -> Iterator[None]:
        device_type, ours = self._device_type, self._is_ours()
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, self._dtype)
        try:
            yield
        finally:
            if self._is_ours() is ours:
                torch.set_autocast_enabled(device_type, before[0])
                torch.set_autocast_dtype(device_type, before[1])

    # The borders. Each takes what torch has there and returns what is to stand in its place.

    def _around_module_call(self, call: Function) -> Function:
        thread, caster, is_compiling = self._thread, self._caster, torch.compiler.is_compiling

        # No functools.wraps: this is called more often than anything else here.
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling() or thread.is_in_module or not caster.active:
                return call(module, *args, **kwargs)
            return self._call_outermost(call, module, args, kwargs)

        return __call__

    def _call_outermost(self, call: Function, module: Any, args: Any, kwargs: Any) -> Any:
        """Call a module that no other one calls; casts of weights are kept until it returns."""
        thread, ours = self._thread, self._is_ours()
        if thread.optimizer_steps and not thread.off:
            # No closure runs: a step before has raised.
            thread.optimizer_steps = 0
            torch.set_autocast_enabled(self._device_type, True)
        if self._has_left_region():
            self._set_casts_on()
        if module not in self._models:
            self._models.add(module)
            local_gradients.note(
                *(each for each in module.modules() if isinstance(each, DistributedDataParallel))
            )
        keeps_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(
            self._caster.enable_caching and torch._C._get_tracing_state() is None
        )
        thread.is_in_module = True
        try:
            with self._casts_on() if self._is_strange_thread() else contextlib.nullcontext():
                return call(module, *args, **kwargs)
        finally:
            thread.is_in_module = False
            self.clear_cache()
            if self._is_ours() is ours:
                torch.set_autocast_cache_enabled(keeps_casts)

    def _is_strange_thread(self) -> bool:
        """Whether this thread began before init(), or without Python, and is nobody's region."""
        thread = self._thread
        if self._is_ours() or thread.off or torch._C._current_graph_task_id() != -1:
            return False
        return _nesting() == 0

    def _around_engine(self, run: Function) -> Function:
        @functools.wraps(run)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._caster.is_on():
                return run(*args, **kwargs)
            self._count_backward(1)
            try:
                with self.casts_off():
                    return run(*args, **kwargs)
            finally:
                self._count_backward(-1)

        return _engine_run_backward

    def _count_backward(self, change: int) -> None:
        with self._lock:
            self._backward_calls += change

    def _around_custom_backward(self, apply: Function) -> Function:
        @functools.wraps(apply)
        def wrapper(node: Any, *args: Any) -> Any:
            is_torchs = node._forward_cls.__module__.split(".")[0] == "torch"
            if is_torchs or not self._backward_calls or not self._caster.active:
                return apply(node, *args)
            with self._casts_on():
                return apply(node, *args)

        return wrapper

    def _around_enter(self, enter: Function) -> Function:
        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:  # noqa: N807
            result = enter(region)
            if self._caster.active:
                self._thread.regions.append(region)
                self._clear_cache_of(region)
            return result

        return __enter__

    def _around_exit(self, leave: Function) -> Function:
        @functools.wraps(leave)
        def __exit__(region: Any, *error: Any) -> Any:  # noqa: N807
            result = leave(region, *error)
            if not self._caster.active:
                return result
            self._clear_cache_of(region)
            thread = self._thread
            thread.regions = [each for each in thread.regions if each is not region]
            return result

        return __exit__

    def _clear_cache_of(self, region: Any) -> None:
        """Clear the cache at the border of a region, unless the same casts go on there."""
        if not self._thread.is_in_module or region.fast_dtype is not region.prev_fastdtype:
            self.clear_cache()  # torch's does not know of which dtype a cast is wanted.

    def _around_thread(self, run: Function) -> Function:
        @functools.wraps(run)
        def _bootstrap_inner(thread: threading.Thread) -> None:
            if self._caster.active:
                self._switch_on_here()
            run(thread)

        return _bootstrap_inner

    def _around_worker(self, loop: Function) -> Function:
        @functools.wraps(loop)
        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            self._close_in_worker()
            return loop(*args, **kwargs)

        return _worker_loop

    def _around_script(self, patches: Patches, script: Function) -> Function:
        @functools.wraps(script)
        def _script_impl(*args: Any, **kwargs: Any) -> Any:
            # The compiler of TorchScript reads the source of what is called, and not of wrappers.
            with patches.suspended() if self._caster.active else contextlib.nullcontext():
                return script(*args, **kwargs)

        return _script_impl

    # Optimizers.

    def _before_optimizer_step(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        thread = self._thread
        if thread.optimizer_steps == 0 and not torch.is_autocast_enabled(self._device_type):
            return None
        thread.optimizer_steps += 1
        torch.set_autocast_enabled(self._device_type, False)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._closure_with_casts(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._closure_with_casts(kwargs["closure"])}
        return None

    def _after_optimizer_step(self, *_: Any) -> None:
        thread = self._thread
        if thread.optimizer_steps == 0:
            return
        thread.optimizer_steps -= 1
        if thread.is_in_module:
            self.clear_cache()  # A module may train others: their weights are new now.
        if thread.optimizer_steps == 0:
            torch.set_autocast_enabled(self._device_type, True)

    def _closure_with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        thread = self._thread

        @functools.wraps(closure)
        def wrapper() -> Any:
            steps, thread.optimizer_steps = thread.optimizer_steps, 0
            torch.set_autocast_enabled(self._device_type, True)
            value = closure()
            # Not in a finally: what a closure raises ends the step too.
            if self._caster.active:
                torch.set_autocast_enabled(self._device_type, False)
                thread.optimizer_steps = steps
            return value

        return wrapper


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def show_torch_to_dynamo() -> None:
    """Let Dynamo note which functions are torch's own, before others stand in their places.

    It notes them once in a process, at the latest when the first optimizer is made.
    """
    from torch._dynamo import trace_rules  # Takes two seconds, which that optimizer would take.

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()
