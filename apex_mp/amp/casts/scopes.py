"""Where casts are on: in the whole process, except in autograd, optimizers and data loading.

torch.autocast is made for a `with` block. Casts of a whole process must also
- be on in every thread until they are switched off, then in none, and never in DataLoader workers;
- be off while the autograd engine runs, because a backward formula has the dtypes of its forward;
  in the user's Python code in backward they are on, as in its forward;
- be off in an optimizer's step, and on in its closure;
- keep no cast of a weight that was edited since.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.data._utils import worker as data_worker

from apex_mp.amp.casts.casting import Caster, Function
from apex_mp.amp.casts.patching import Patches
from apex_mp.grads import local_gradients


class Scopes:
    """Switches casts on and off where a call enters or leaves autograd, an optimizer and so on.

    Args:
        caster: The casts.
        close_in_worker: Called in a DataLoader worker before anything else.
    """

    def __init__(self, caster: Caster, close_in_worker: Callable[[], None]) -> None:
        self._caster = caster
        self._switch = caster.switch
        self._device_type = caster.device_type
        self._close_in_worker = close_in_worker
        self._thread = self._switch.thread
        self._backward_calls = 0  # under way, in any thread, with casts suspended
        self._lock = threading.Lock()  # guards that number
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._had_fastpath: bool | None = None

    # Opening and closing.

    def open(self, patches: Patches) -> None:
        """Switch casts on in this thread, and install the wrappers that switch them elsewhere."""
        self._switch.open()
        if self._device_type == "cpu":
            # The fast path of attention in evaluation gives uncast weights to a kernel; torch
            # itself does not use it under CUDA's autocast.
            self._had_fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        node = torch.autograd.function.BackwardCFunction
        for owner, name, around in (
            (torch.nn.Module, "__call__", self._around_module_call),
            (torch.autograd, "_engine_run_backward", self._around_engine),
            (node, "apply", self._around_custom_backward),
            (node, "apply_boxed", self._around_custom_backward),
            (torch.amp.autocast_mode.autocast, "__init__", self._caster.follow),  # Asks for dtype.
            (torch.amp.autocast_mode.autocast, "__enter__", self._around_enter),
            (torch.amp.autocast_mode.autocast, "__exit__", self._around_exit),
            (torch.utils.checkpoint, "_get_autocast_kwargs", self._caster.follow),
            (data_worker, "_worker_loop", self._around_worker),
            (torch.jit._script, "_script_impl", functools.partial(self._around_script, patches)),
        ):
            if hasattr(owner, name):  # Not every torch has all of them.
                patches.install(owner, name, around)
        if self._caster.enable_caching:
            patches.install(Tensor, "data", self._around_data)
        for register, hook in (
            (torch_optimizer.register_optimizer_step_pre_hook, self._before_optimizer_step),
            (torch_optimizer.register_optimizer_step_post_hook, self._after_optimizer_step),
        ):
            self._hooks.append(register(hook))  # type: ignore[arg-type]

    def close(self) -> None:
        """Switch casts off; the caller restores what was patched."""
        for hook in self._hooks:
            hook.remove()
        if self._had_fastpath is not None:
            torch.backends.mha.set_fastpath_enabled(self._had_fastpath)
        self.clear_cache()
        self._switch.close()

    def clear_cache(self) -> None:
        """Drop all kept casts of weights, torch's and ours."""
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

    # Wrappers. Each method takes a function of torch and returns its replacement.

    def _around_module_call(self, call: Function) -> Function:
        thread, switch, is_compiling = self._thread, self._switch, torch.compiler.is_compiling

        # No functools.wraps: this is called more often than anything else here.
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling() or thread.is_in_module or not switch.active:
                return call(module, *args, **kwargs)
            return self._call_outermost(call, module, args, kwargs)

        return __call__

    def _call_outermost(self, call: Function, module: Any, args: Any, kwargs: Any) -> Any:
        """Call an outermost module; casts of weights are kept until it returns."""
        thread, switch = self._thread, self._switch
        if thread.optimizer_steps and not thread.off:
            # No closure is running, so the step that is counted has raised an error.
            thread.optimizer_steps = 0
            torch.set_autocast_enabled(self._device_type, thread.enabled_before_step)
        self._models.add(module)
        local_gradients.note_call(module)
        thread.keeps_casts = self._caster.enable_caching and torch._C._get_tracing_state() is None
        thread.is_in_module = True
        try:
            is_due = not switch.is_on() and switch.is_due()
            with switch.on_for_a_call() if is_due else contextlib.nullcontext():
                return call(module, *args, **kwargs)
        finally:
            thread.is_in_module = thread.keeps_casts = False
            self.clear_cache()

    def _around_engine(self, run: Function) -> Function:
        @functools.wraps(run)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._switch.is_on() and not self._switch.is_due():
                return run(*args, **kwargs)
            self._count_backward(1)
            try:
                with self._switch.casts_off():
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
            if is_torchs or not self._backward_calls or not self._switch.active:
                return apply(node, *args)
            with self._switch.casts_on():
                return apply(node, *args)

        return wrapper

    def _around_enter(self, enter: Function) -> Function:
        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:  # noqa: N807
            result = enter(region)
            if self._switch.active:
                self._thread.regions.append(region)
            return result

        return __enter__

    def _around_exit(self, leave: Function) -> Function:
        @functools.wraps(leave)
        def __exit__(region: Any, *error: Any) -> Any:  # noqa: N807
            result = leave(region, *error)
            thread = self._thread
            thread.regions = [each for each in thread.regions if each is not region]
            if region._enabled:
                self._caster.cache.clear()  # No cast outlives the region that it is made in.
            return result

        return __exit__

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
            with patches.suspended() if self._switch.active else contextlib.nullcontext():
                return script(*args, **kwargs)

        return _script_impl

    def _around_data(self, data: Any) -> Any:
        cache = self._caster.cache

        def get(tensor: Tensor) -> Any:
            cache.pop(tensor, None)  # An edit through `.data` changes no version.
            return data.__get__(tensor)

        def set_(tensor: Tensor, value: Tensor) -> None:
            cache.pop(tensor, None)
            data.__set__(tensor, value)

        return property(get, set_, data.__delete__)

    # Optimizers.

    def _before_optimizer_step(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        thread, switch = self._thread, self._switch
        if thread.optimizer_steps == 0:
            if not switch.is_on() and not switch.is_due():
                return None
            thread.enabled_before_step = switch.is_on()
        thread.optimizer_steps += 1
        torch.set_autocast_enabled(self._device_type, False)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._closure_with_casts(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._closure_with_casts(kwargs["closure"])}
        return None

    def _after_optimizer_step(self, *_: Any) -> None:
        self._caster.cache.clear()  # torch's fused steps change no version.
        thread = self._thread
        if thread.optimizer_steps == 0:
            return
        thread.optimizer_steps -= 1
        if thread.optimizer_steps == 0:
            torch.set_autocast_enabled(self._device_type, thread.enabled_before_step)

    def _closure_with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        thread = self._thread

        @functools.wraps(closure)
        def wrapper() -> Any:
            steps, thread.optimizer_steps = thread.optimizer_steps, 0
            enabled = thread.enabled_before_step
            torch.set_autocast_enabled(self._device_type, enabled)
            value = closure()
            # Not in a finally: an error in a closure ends the step too.
            if self._switch.active:
                torch.set_autocast_enabled(self._device_type, False)
                thread.optimizer_steps, thread.enabled_before_step = steps, enabled
            return value

        return wrapper


def show_torch_to_dynamo() -> None:
    """Let Dynamo note which functions are torch's own, before they are replaced.

    It notes them once in a process, at the latest when the first optimizer is made.
    """
    from torch._dynamo import trace_rules  # Takes two seconds, which that optimizer would take.

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()
