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
from torch.optim import optimizer as torch_optimizer
from torch.utils.data._utils import worker as data_worker

from apex_mp.amp.casting import Caster, Function
from apex_mp.amp.patching import Patches


class _Thread(threading.local):
    """What one thread is in the midst of."""

    module_calls = 0
    records_grad = True
    casting: Caster | None = None  # whose casts were switched on in this thread
    optimizer_steps = 0


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
        self._before: tuple[bool, torch.dtype, bool] | None = None
        self._home = threading.get_ident()

    # Opening and closing.

    def open(self, patches: Patches) -> None:
        """Switch casts on in this thread, and install what carries them on."""
        device_type = self._device_type
        self._before = (
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )
        self._switch_on_here()
        torch.set_autocast_cache_enabled(False)
        patches.install(torch.nn.Module, "__call__", self._around_module_call)
        patches.install(torch.autograd, "_engine_run_backward", self._around_engine)
        for name in ("apply", "apply_boxed"):
            if hasattr(torch.autograd.function.BackwardCFunction, name):
                patches.install(
                    torch.autograd.function.BackwardCFunction, name, self._around_custom_backward
                )
        for name in ("__enter__", "__exit__"):
            patches.install(torch.amp.autocast_mode.autocast, name, self._around_users_autocast)
        patches.install(threading.Thread, "start", self._around_thread_start)
        patches.install(data_worker, "_worker_loop", self._around_worker)
        self._hooks = [
            torch_optimizer.register_optimizer_step_pre_hook(self._before_optimizer_step),
            torch_optimizer.register_optimizer_step_post_hook(self._after_optimizer_step),
        ]

    def close(self) -> None:
        """Switch casts off; what was patched is the caller's to restore."""
        for hook in self._hooks:
            hook.remove()
        self.clear_cache()
        self._caster.cache.open = False
        assert self._before is not None
        enabled, dtype, cache = self._before
        torch.set_autocast_cache_enabled(cache)
        if threading.get_ident() == self._home:
            torch.set_autocast_enabled(self._device_type, enabled)
            torch.set_autocast_dtype(self._device_type, dtype)
            torch.autocast_decrement_nesting()
        self._thread.casting = None

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
        before = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, False)
        try:
            yield
        finally:
            torch.set_autocast_enabled(self._device_type, before)

    @contextlib.contextmanager
    def _casts_on(self) -> Iterator[None]:
        device_type = self._device_type
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, self._dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device_type, before[0])
            torch.set_autocast_dtype(device_type, before[1])

    def _switch_on_here(self) -> None:
        torch.set_autocast_enabled(self._device_type, True)
        torch.set_autocast_dtype(self._device_type, self._dtype)
        # Else any autocast region of the user's would empty the cache when it ends.
        torch.autocast_increment_nesting()
        self._thread.casting = self._caster

    # The borders. Each takes what torch has there and returns what is to stand in its place.

    def _around_module_call(self, call: Function) -> Function:
        thread = self._thread
        is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        # No functools.wraps: this is called more often than anything else here.
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling():
                return call(module, *args, **kwargs)
            if thread.module_calls == 0:
                with self._outermost_module_call(module):
                    return call(module, *args, **kwargs)
            if is_grad_enabled() is not thread.records_grad:
                # A cast made without a graph would cost the weight its gradient.
                self.clear_cache()
                thread.records_grad = not thread.records_grad
            return call(module, *args, **kwargs)

        return __call__

    @contextlib.contextmanager
    def _outermost_module_call(self, module: torch.nn.Module) -> Iterator[None]:
        thread = self._thread
        thread.module_calls = 1
        self._models.add(module)
        thread.records_grad = torch.is_grad_enabled()
        if thread.optimizer_steps:
            # No closure runs: a step before has raised.
            thread.optimizer_steps = 0
            torch.set_autocast_enabled(self._device_type, True)
        caching = self._caster.enable_caching
        torch.set_autocast_cache_enabled(caching)
        self._caster.cache.open = caching
        try:
            if thread.casting is self._caster:
                yield
            else:  # A thread from before init(), or one that Python did not start.
                with self._casts_on():
                    yield
        finally:
            thread.module_calls = 0
            self._caster.cache.open = False
            torch.set_autocast_cache_enabled(False)
            self.clear_cache()

    def _around_engine(self, run: Function) -> Function:
        @functools.wraps(run)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(self._device_type):
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
        def wrapper(context: Any, *args: Any) -> Any:
            is_torchs = context._forward_cls.__module__.split(".")[0] == "torch"
            if is_torchs or not self._backward_calls:
                return apply(context, *args)
            with self._casts_on():
                return apply(context, *args)

        return wrapper

    def _around_users_autocast(self, method: Function) -> Function:
        @functools.wraps(method)
        def wrapper(autocast: Any, *args: Any) -> Any:
            before = torch.get_autocast_dtype(self._device_type)
            result = method(autocast, *args)
            if torch.get_autocast_dtype(self._device_type) is not before:
                self.clear_cache()  # torch's does not know of which dtype a cast is wanted.
            return result

        return wrapper

    def _around_thread_start(self, start: Function) -> Function:
        @functools.wraps(start)
        def wrapper(thread: threading.Thread) -> None:
            run = thread.run

            def run_with_casts() -> None:
                del thread.run
                if self._caster.active:
                    self._switch_on_here()
                run()

            thread.run = run_with_casts  # type: ignore[method-assign]
            start(thread)

        return wrapper

    def _around_worker(self, loop: Function) -> Function:
        @functools.wraps(loop)
        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            self._close_in_worker()
            return loop(*args, **kwargs)

        return _worker_loop

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
            torch.set_autocast_enabled(self._device_type, False)
            thread.optimizer_steps = steps
            return value

        return wrapper
