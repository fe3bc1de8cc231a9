"""Find where inf or NaN begins: run a batch again, and check what each module and node computes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from apex_mp.monitor._ranges import (
    Range,
    holds_nonfinite,
    is_more_than_minus_inf,
    is_wrong,
    present_in,
    range_of,
    ranges_of,
    tensors_in,
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where inf or NaN began.

    Attributes:
        phase: "weights", "inputs", "forward", "loss" or "backward".
        module: Name of the module in the model; "" is the model itself, None is code outside it.
        kind: Its class, for example "Linear"; "" if there is no module.
        call: Which call of the module it was, from 1.
        place: Where in a module's own code: "between a and b", for modules a and b that it calls;
            "" if it calls none.
        operation: In backward: the node of autograd, for example "DivBackward0"; else "".
        results: The tensors computed there that hold inf or NaN.
        inputs: The inputs of the module in forward.
        grads: In backward: the gradients given to the node, all finite.
    """

    phase: str
    module: str | None
    kind: str = ""
    call: int = 1
    place: str = ""
    operation: str = ""
    results: tuple[Range, ...] = ()
    inputs: tuple[Range, ...] = ()
    grads: tuple[Range, ...] = ()

    def __str__(self) -> str:
        lines = [_SENTENCES[self.phase].format(what=self._what(), operation=self.operation)]
        for title, ranges in (
            ("result", self.results),
            ("gradient given to it", self.grads),
            ("input in forward" if self.grads else "input", self.inputs),
        ):
            lines += [f"  {title} {each.name}: {each}" for each in ranges]
        return "\n".join(lines)

    def _what(self) -> str:
        if self.module is None:
            return "code outside of the model"
        name = f"{self.module} ({self.kind})" if self.module else f"the model itself ({self.kind})"
        name = name if self.call == 1 else f"{name}, call {self.call}"
        return f"{name}, {self.place}" if self.place else name


_SENTENCES = {
    "weights": "inf or NaN is in a weight or buffer of {what}",
    "inputs": "inf or NaN is in the inputs of {what}",
    "forward": "inf or NaN begins in the forward of {what}",
    "loss": "inf or NaN begins in the loss, computed of finite outputs",
    "backward": "inf or NaN begins in the backward of {what}, in {operation}",
}


def find_nonfinite(
    model: torch.nn.Module, run: Callable[[], Tensor], *, scale: float | Tensor = 1.0
) -> Origin | None:
    """Run a batch again, forward and backward, and find the first inf or NaN.

        origin = find_nonfinite(model, lambda: criterion(model(x), y), scale=optimizer.loss_scale)
        print(origin)

    Weights and buffers are checked first, then the results of all modules in the order of forward,
    then the loss, then each node of autograd in the order of backward. Code in a module's own
    forward counts as that module's. -inf, as in masks, is ignored if it depends on no weight, or
    if no other inf or NaN follows from it.

    Gradients, buffers, and torch's random number generators on the CPU and on GPUs are afterwards
    as before, to the bit. Attributes that modules change in Python are not restored. Compiled code
    runs eagerly, so that hooks of its modules run; inf that only compiled code computes is not
    found. It is slow, and waits for the device after each module.

    Args:
        model: The model, not a DistributedDataParallel around it.
        run: Computes the loss of the batch and returns it; does not call backward, nor step.
        scale: The loss scale to run backward with [1].

    Returns:
        Where it began; None if all is finite, which other random numbers may cause.

    Raises:
        TypeError: `model` is no module, `run` is no function, or it returns no tensor.
        ValueError: The loss is no scalar, or does not depend on parameters.
        RuntimeError: Forward is finite, and has reentrant activation checkpoints.
    """
    anything: Any = model
    if not isinstance(anything, torch.nn.Module):
        given = "None" if anything is None else f"a {type(anything).__name__}"
        raise TypeError(f"find_nonfinite: model is {given}; it must be a torch.nn.Module")
    if not callable(run):
        raise TypeError(
            f"find_nonfinite: run is a {type(run).__name__}; it must be a function that computes "
            "the loss, such as lambda: criterion(model(x), y)"
        )
    broken = _in_weights(model)
    if broken is not None:
        return broken
    search = _Search(model)
    with _all_restored(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        with search.watching_forward():
            loss = run()
        _check_loss(loss)
        found = search.found_in_forward(loss)
        if found is not None:
            return found
        factor = scale.to(loss.device) if isinstance(scale, Tensor) else scale
        wide = loss if loss.dtype == torch.float64 else loss.float()
        return search.found_in_backward(wide * factor)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"find_nonfinite: run returned a {type(loss).__name__}; it must return the loss, and "
            "leave backward to find_nonfinite"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"find_nonfinite: the loss has the shape {[*loss.shape]} and requires_grad is "
            f"{loss.requires_grad}; it must be a scalar that depends on the parameters"
        )


def _in_weights(model: torch.nn.Module) -> Origin | None:
    """Find inf and NaN in a model's parameters and buffers; -inf in a buffer is a mask."""
    for module, name in _names_of(model).items():
        held = [
            *module.named_parameters(recurse=False),
            *(
                (key, each)
                for key, each in module.named_buffers(recurse=False)
                if is_more_than_minus_inf(each)
            ),
        ]
        results = tuple(range_of(key, each) for key, each in held if holds_nonfinite(each))
        if results:
            return Origin("weights", name, type(module).__name__, results=results)
    return None


def _names_of(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return all modules and their names, as if none were compiled.

    `torch.compile` wraps a module in another one, whose only child is `_orig_mod`.
    """
    return {
        module: ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name, module in model.named_modules()
        if not isinstance(getattr(module, "_orig_mod", None), torch.nn.Module)
    }


@dataclasses.dataclass
class _Call:
    """A call of a module.

    Attributes:
        inputs: The inputs of the call.
        was_given_it: Whether an input held inf or NaN already; a mask does not count.
        results: The results that hold inf or NaN, once the call has returned.
        is_minus_inf: Whether these hold -inf only, as attention expects.
        called: The module that its code has called last.
        place: As of Origin, for the results.
    """

    module: str
    kind: str
    number: int
    inputs: tuple[Range, ...]
    was_given_it: bool
    results: tuple[Range, ...] = ()
    is_minus_inf: bool = False
    called: str = ""
    place: str = ""

    def place_before(self, module: str = "") -> str:
        """Return where its code is, as of Origin, before it calls a module or returns."""
        if self.called and module:
            return f"between {self.called} and {module}"
        if self.called:
            return f"after {self.called}"
        return f"before {module}" if module else ""


class _Search:
    """Checks each module's results, and records which module made which node of autograd."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = _names_of(model)
        self._counts: dict[torch.nn.Module, int] = {}
        self._open: list[_Call] = []
        # Calls, and code between calls, with results that are not finite, in order of forward.
        self._events: list[_Call] = []
        # With the place in its code.
        self._made_by: dict[Any, tuple[_Call | None, str]] = {}

    # Forward.

    @contextlib.contextmanager
    def watching_forward(self) -> Iterator[None]:
        """Check all modules when they are called in the block."""
        handles = []
        try:
            for module in self._names:
                handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._open.clear()

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given = (args, kwargs) if kwargs else args
        caller = self._open[-1] if self._open else None
        name = self._names[module]
        self._claim(given, caller, name)
        number = self._counts[module] = self._counts.get(module, 0) + 1
        inputs, was_given_it = tuple(ranges_of(given)), any(map(is_wrong, present_in(given)))
        kind = type(module).__name__
        self._open.append(_Call(name, kind, number, inputs, was_given_it))
        if caller is None:
            self._judge(self._open[-1], given)
        elif not caller.was_given_it:
            self._judge(caller, given, name)  # Its own code may have made them.

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, results: Any) -> None:
        call = self._open.pop()
        self._claim(results, call)
        self._judge(call, results)
        if self._open:
            self._open[-1].called = call.module

    def _judge(self, call: _Call, results: Any, before: str = "") -> None:
        bad = [(path, each) for path, each in tensors_in(results) if is_wrong(each)]
        if not bad or any(event is call for event in self._events):
            return
        # Appended after modules inside it, and after code inside it that called one.
        self._events.append(call)
        call.place = call.place_before(before)
        call.results = tuple(range_of(path, each) for path, each in bad)
        call.is_minus_inf = not any(is_more_than_minus_inf(each) for _, each in bad)

    def _claim(self, values: Any, call: _Call | None, before: str = "") -> None:
        """Record the call that made the nodes that lead to tensors, unless they have one."""
        place = "" if call is None else call.place_before(before)
        todo = [each.grad_fn for _, each in tensors_in(values)]
        while todo:
            node = todo.pop()
            if node is None or node in self._made_by:
                continue
            self._made_by[node] = call, place
            todo += [each for each, _ in node.next_functions]

    def found_in_forward(self, loss: Tensor) -> Origin | None:
        """Return where the first inf or NaN of forward was computed."""
        self._claim(loss, None)
        first = next((call for call in self._events if not call.is_minus_inf), None)
        if first is None and not holds_nonfinite(loss):
            return None
        if first is None or first.was_given_it:  # Then a -inf was the first, and no mask.
            first = self._events[0] if self._events else None
        if first is None:
            return Origin("loss", None, results=(range_of("loss", loss.detach()),))
        phase = "inputs" if first.was_given_it else "forward"
        results, place = ((), "") if phase == "inputs" else (first.results, first.place)
        where = first.module, first.kind, first.number, place
        return Origin(phase, *where, results=results, inputs=first.inputs)

    # Backward.

    def found_in_backward(self, loss: Tensor) -> Origin | None:
        """Run backward; return where the first inf or NaN was computed."""
        self._claim(loss, None)
        if any(node.name() == "CheckpointFunctionBackward" for node in self._made_by):
            # torch.autograd.grad raises an error in such a checkpoint, or skips it.
            raise RuntimeError(
                "find_nonfinite: the model has reentrant activation checkpoints, whose backward "
                "cannot be looked into; call torch.utils.checkpoint with use_reentrant=False"
            )
        found: list[Origin] = []

        def look(node: Any, made: Any, given: Any) -> None:
            if found or not any(map(holds_nonfinite, present_in(made))):
                return
            found.append(self._origin(node, made, given))

        def look_before(node: Any, given: Any) -> None:
            # Finite gradients of several uses may add up to inf, which no node computes.
            if not found and any(map(holds_nonfinite, present_in(given))):
                found.append(self._origin(node, given, (), operation="a sum of gradients"))

        handles = []
        for node in self._made_by:
            if node.name() != "torch::autograd::AccumulateGrad":
                handles.append(node.register_hook(lambda m, g, node=node: look(node, m, g)))
                handles.append(node.register_prehook(lambda g, node=node: look_before(node, g)))
        params = [param for param in self._model.parameters() if param.requires_grad]
        try:
            # Not backward(): that writes to .grad, and runs the hooks of DistributedDataParallel.
            grads = torch.autograd.grad(loss, params, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            self._made_by.clear()
        if not any(holds_nonfinite(grad) for grad in grads if grad is not None):
            return None
        return found[0] if found else self._found_in_sums(params, grads)

    def _origin(self, node: Any, made: Any, given: Any, operation: str = "") -> Origin:
        call, place = self._made_by.get(node, (None, ""))
        return Origin(
            "backward",
            None if call is None else call.module,
            "" if call is None else call.kind,
            1 if call is None else call.number,
            place,
            operation or node.name(),
            results=tuple(each for each in ranges_of(made) if each.inf or each.nan),
            inputs=() if call is None else call.inputs,
            grads=tuple(ranges_of(given)),
        )

    def _found_in_sums(self, params: Any, grads: Any) -> Origin | None:
        """Find a parameter with several uses whose gradients are finite but their sum is not."""
        wrong = {
            id(param): grad
            for param, grad in zip(params, grads, strict=True)
            if grad is not None and holds_nonfinite(grad)
        }
        for module, name in self._names.items():
            for key, param in module.named_parameters(recurse=False):
                if id(param) in wrong:
                    return Origin(
                        "backward",
                        name,
                        type(module).__name__,
                        operation="a sum of gradients",
                        results=(range_of(key, wrong[id(param)]),),
                    )
        return None


@contextlib.contextmanager
def _all_restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random numbers when the block ends, as the same tensors."""
    grads = [(param, param.grad) for param in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    clones = {
        id(buffer): buffer.detach().clone()
        for _, held in buffers
        for buffer in held.values()
        if buffer is not None
    }
    gpus = {param.device for param in model.parameters() if param.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index for device in gpus)):
        try:
            for param, _ in grads:
                param.grad = None
            for module, held in buffers:
                module._buffers.update({k: clones.get(id(each)) for k, each in held.items()})
            yield
        finally:
            for param, grad in grads:
                param.grad = grad
            for module, held in buffers:
                module._buffers.clear()
                module._buffers.update(held)
