"""Runs programs, one a line of stdin, on the apex_mp of PYTHONPATH; writes what each line did.

A program is a list of Python statements over the names of `Space`. After each statement the trace
holds its value or its exception, its warnings and what it printed, and what has changed of the
model, the optimizer and the state: every tensor by dtype, shape, strides and a hash of its bits.
Looking must not change what the package does: no property of an optimizer is read, and `.grad` is
read where torch keeps it. `look()` is the statement that reads the properties.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import gc
import hashlib
import io
import json
import os
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo  # The first step() imports it: once here, not in each child.
from torch import Tensor, nn

import apex_mp
from apex_mp import amp, convert, fp16_utils, loss_scale, optimizers, parallel
from apex_mp.amp import _amp_state
from apex_mp.multi_tensor_apply import fused_adam_cuda

RAW_GRAD: Any = torch.Tensor.grad  # Without the property that FP16_Optimizer's masters have.
ADDRESS = re.compile(r"0x[0-9a-f]{6,}|(?<![.\d])\d{14,}\b")  # id() is one, too.
LOOKED_AT = [
    "loss_scale", "loss_scaler", "overflow", "overflow_report", "dynamic_loss_scale", "cur_iter",
    "clip", "last_overflow_iter", "scale_window", "first_closure_call_this_step",
    "step_was_skipped", "fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups",
    "fp32_groups_flat", "defaults", "eps_mode", "unscale_grads", "wd_after_momentum",
    "materialize_master_grads", "set_grad_none",
]  # fmt: skip


def random_values(seed: int, shape: Any, magnitude: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn([*shape], generator=generator, dtype=torch.float64) * magnitude


class Net(nn.Module):
    """Parameters of given shapes, of which the last `spare` are left out of groups().

    Args:
        seed: Of the values.
        shapes: Of the parameters; one that ends in "t" is transposed in memory.
        dtypes: Of the parameters, in turn; the first is that of the layers.
        layers: Add two linear layers with a batch norm between, which `forward` calls.
    """

    def __init__(self, seed: int, shapes: Any, dtypes: Any, layers: bool = False) -> None:
        super().__init__()
        self.has_layers = layers
        if layers:
            self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.to(dtypes[0])
            with torch.no_grad():
                for number, param in enumerate(self.parameters()):
                    param.copy_(random_values(seed + number, param.shape))
        for number, shape in enumerate(shapes):
            values = random_values(seed - 1 - number, shape).to(dtypes[number % len(dtypes)])
            if len(shape) == 2 and number % 2:
                values = values.t().contiguous().t()
            self.register_parameter(f"w{number}", nn.Parameter(values))

    def groups(self, number: int, *options: Any, spare: int = 0) -> list[dict[str, Any]]:
        params = [*self.parameters()]
        params = params[: max(1, len(params) - spare)]
        more = [options[n] if n < len(options) else {} for n in range(number)]
        return [{"params": params[n::number], **more[n]} for n in range(number)]

    def spare(self, index: int) -> nn.Parameter:
        return [*self.parameters()][-1 - index]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


class Space(dict[str, Any]):
    """The names that a program may use: modules, `model`, `optimizer` and the helpers below."""

    def __init__(self) -> None:
        super().__init__(
            torch=torch, nn=nn, copy=copy, pickle=pickle, F16=torch.float16, BF16=torch.bfloat16,
            F32=torch.float32, F64=torch.float64, inf=float("inf"), nan=float("nan"), Net=Net,
            FusedAdam=optimizers.FusedAdam, FusedSGD=optimizers.FusedSGD, amp=amp, convert=convert,
            fp16_utils=fp16_utils, loss_scale=loss_scale, optimizers=optimizers, parallel=parallel,
            fused_adam_cuda=fused_adam_cuda, values=random_values, model=None, optimizer=None,
            scaler=None, handle=None, kept=None, outputs=[], names=[],
        )  # fmt: skip
        helpers = (self.P, self.S, self.backward, self.closure, self.set_grads, self.legacy)
        self.update(
            {
                h.__name__: h
                for h in (
                    *helpers,
                    self.look,
                    self.through_file,
                    self.stepped,
                    self.two_devices,
                    self.model_of,
                )
            }
        )

    def P(self, index: int) -> Any:  # noqa: N802
        """A parameter of the optimizer: a master, if it has masters."""
        params = [p for group in self["optimizer"].param_groups for p in group["params"]]
        return params[index % len(params)]

    def S(self, index: int) -> Any:  # noqa: N802
        """The state of a parameter of the optimizer."""
        return self["optimizer"].state[self.P(index)]

    def model_of(self, index: int) -> Any:
        params = [*self["model"].parameters()]
        return params[index % len(params)]

    def loss(self, seed: int, magnitude: float, bad: Any, without: Any) -> Tensor:
        """A loss whose gradients are random numbers, one of them `bad[1]`."""
        model = self["model"]
        terms = []
        for number, param in enumerate(model.parameters()):
            if not param.requires_grad or number in without:
                continue
            grad = random_values(seed + number, param.shape, magnitude)
            if bad and number == bad[0] and grad.numel():
                grad.view(-1)[-1] = bad[1]
            terms.append((param.double() * grad).sum())
        loss = torch.stack(terms).sum().float()
        if model.has_layers:
            x = random_values(seed, (4, 3)).to(model.first.weight.dtype)
            loss = loss + model(x).float().square().sum()
        return loss

    def backward(
        self, seed: int, magnitude: float = 1.0, bad: Any = None, without: Any = (), **more: Any
    ) -> Tensor:
        """Backward through whatever scales the loss in this program."""
        optimizer, loss = self["optimizer"], self.loss(seed, magnitude, bad, without)
        if self["scaler"] is not None:
            self["scaler"].scale(loss).backward()
        elif hasattr(optimizer, "backward"):
            optimizer.backward(loss, **more)
        else:
            with self.scaling(loss, more) as scaled:
                scaled.backward()
        return loss.detach()

    def scaling(self, loss: Tensor, more: Any) -> contextlib.AbstractContextManager[Tensor]:
        if hasattr(self["optimizer"], "scale_loss"):
            return self["optimizer"].scale_loss(loss)
        if self["handle"] is not None:
            return self["handle"].scale_loss(loss, self["optimizer"])
        if _amp_state.opt_properties is not None:
            return amp.scale_loss(loss, self["optimizer"], **more)
        return contextlib.nullcontext(loss)

    def closure(self, *arguments: Any, **options: Any) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            self["optimizer"].zero_grad()
            return self.backward(*arguments, **options)

        return evaluate

    def set_grads(self, seed: int, form: str = "", magnitude: float = 1.0, bad: Any = None) -> None:
        """Set each `.grad` by hand; `form` says how they lie in memory, or what is wrong."""
        params = [p for group in self["optimizer"].param_groups for p in group["params"]]
        shared: dict[Any, Tensor] = {}
        for number, param in enumerate(params):
            grad = random_values(seed + number, param.shape, magnitude)
            if bad and number == bad[0] % len(params) and grad.numel():
                grad.view(-1)[0] = bad[1]
            grad = grad.to(param.dtype)
            if form == "turned" and grad.dim() > 1:
                grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
            elif form == "strided":
                grad = torch.stack([grad, grad], -1)[..., 0]
            elif form == "offset":
                grad = torch.cat([grad.new_zeros(1), grad.reshape(-1)])[1:].view(param.shape)
            elif form == "expanded":
                grad = grad.new_full((), magnitude).expand(param.shape)
            elif form == "sparse" and grad.dim() and number % 2 == 0:
                grad = grad.to_sparse()
            elif form == "shared":
                grad = shared.setdefault((param.shape, param.dtype), grad)
            elif form == "overlapping":
                key = (param.shape, param.dtype)
                both = shared.setdefault(key, torch.cat([grad.view(-1), grad.view(-1)[:1]]))
                grad = both[number % 2 :][: grad.numel()].view(param.shape)
            elif form == "some":
                grad = grad if number % 2 else None
            elif form == "inference":
                with torch.inference_mode():
                    grad = grad * 1
            param.grad = grad

    def legacy(
        self, seed: int, form: str = "nested", dtype: Any = None, outputs: Any = None,
        wrong: str = "", magnitude: float = 1.0, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Arguments of the legacy call: gradients of a dtype, and outputs of another."""
        groups = [group["params"] for group in self["optimizer"].param_groups]
        grads: Any = [
            [random_values(seed + i, p.shape, magnitude).to(dtype or p.dtype) for p in one]
            for i, one in enumerate(groups)
        ]
        copies: Any = [[torch.zeros_like(p, dtype=outputs) for p in one] for one in groups]
        self["outputs"] = [tensor for one in copies for tensor in one]
        breaks: dict[str, Callable[[], Any]] = {
            "missing": lambda: grads[0].pop(),
            "none": lambda: grads[0].__setitem__(0, None),
            "shape": lambda: grads[0].__setitem__(0, torch.zeros(7, 2)),
            "integers": lambda: grads[0].__setitem__(0, torch.zeros(groups[0][0].shape).long()),
            "kind": lambda: grads[-1].__setitem__(-1, 3.0),
            "output shape": lambda: copies[0].__setitem__(0, torch.zeros(7, 2)),
            "output is param": lambda: copies[0].__setitem__(0, groups[0][0]),
            "output twice": lambda: copies[-1].__setitem__(-1, copies[0][0]),
            "output none": lambda: copies[0].__setitem__(0, None),
            "inf": lambda: grads[0][0].view(-1)[:1].fill_(float("inf")),
            "sparse": lambda: grads[0].__setitem__(0, grads[0][0].to_sparse()),
        }
        breaks.get(wrong, lambda: None)()
        if form != "nested":
            flat = [g for one in grads for g in one], [c for one in copies for c in one]
            grads, copies = (iter(flat[0]), flat[1]) if form == "generator" else flat
        return {"grads": grads, **({"output_params": copies} if outputs else {}), **more}

    def two_devices(self) -> None:
        """Step as with parameters on two devices: those of odd and of even size."""
        from apex_mp.optimizers import _device_part, _several_devices

        def side_of(param: Tensor) -> torch.device:
            return torch.device("cpu", 0) if param.numel() % 2 else torch.device("cpu")

        _device_part.device_of = side_of
        optimizer = self["optimizer"]
        make: Any = getattr(optimizer, "_other_plan", None)  # older builds: the class alone
        optimizer._plan = make(None) if make else _several_devices.SeveralDevices()

    def stepped(self, optimizer: Any, state: Any = None) -> Any:
        """Another optimizer after a step, from a loaded state if there is one."""
        if state is not None:
            optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            for number, param in enumerate(group["params"]):
                param.grad = random_values(number, param.shape).to(param.dtype)
        optimizer.step(*([lambda: 1.0] if isinstance(optimizer, torch.optim.LBFGS) else []))
        optimizer.zero_grad()
        return optimizer

    def through_file(self, value: Any, safe: bool = False) -> Any:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=safe)

    def look(self) -> dict[str, Any]:
        """Read all that may be read, gradients of masters among it."""
        optimizer = self["optimizer"]
        seen = {}
        for name in LOOKED_AT:
            try:
                seen[name] = getattr(optimizer, name)
            except (AttributeError, RuntimeError) as error:
                seen[name] = type(error).__name__
        groups = [group["params"] for group in optimizer.param_groups]
        for name, read in (
            ("grads", lambda: [[p.grad for p in one] for one in groups]),
            ("inspect", lambda: optimizer.inspect_master_grad_data()),
            ("state_dict", lambda: optimizer.state_dict()),
            ("model", lambda: self["model"].state_dict()),
            ("repr", lambda: repr(optimizer)),
            ("scaler", lambda: self["scaler"] and self["scaler"].state_dict()),
        ):
            try:
                seen[name] = read()
            except Exception as error:
                seen[name] = f"{type(error).__name__}: {error}"
        return seen


def describe(value: Any) -> str:
    """Text that is equal for equal values: NaN is NaN, whatever its other bits are."""
    if isinstance(value, Tensor):
        return describe_tensor(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{describe(k)}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple, set)):
        return type(value).__name__ + "[" + ", ".join(map(describe, value)) + "]"
    if hasattr(value, "loss_scale_value"):
        return f"{type(value).__name__}({vars(value)})"
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return type(value).__name__
    return ADDRESS.sub("ADDRESS", repr(value))


def describe_tensor(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype)[6:]}{[*tensor.shape]}"
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return f"{kind} {tensor.layout} on {tensor.device}"
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    plain[plain != plain] = float("nan") if plain.is_floating_point() else 0
    digest = hashlib.sha1(ctypes.string_at(plain.data_ptr(), plain.nbytes)).hexdigest()[:10]
    lies = "" if tensor.is_contiguous() else f" strides {tensor.stride()}"
    first = ", ".join(f"{number:.6g}" for number in plain.view(-1)[:2].tolist())
    return f"{kind}{lies} {digest} ({first}{', ..' if plain.numel() > 2 else ''})"


def version_of(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # An inference tensor has none.
        return 0


class Observer:
    """What there is to see after each statement, without a property of the package being read."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        self._versions: dict[str, tuple[Tensor, int]] = {}

    def changes(self, space: Space) -> dict[str, str]:
        """Return what is new or other than the last time."""
        try:
            with amp.disable_casts():
                tensors = dict(self._tensors(space))
                seen = {name: describe(value) for name, value in tensors.items()}
                seen.update(self._rest(space))
        except Exception as error:
            return {"cannot be seen": f"{type(error).__name__}: {error}"}
        versions = self._versions.items()
        written = [
            n for n, (t, version) in versions if tensors.get(n) is t and version_of(t) > version
        ]
        seen["written"] = ", ".join(written)
        with_numbers = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
        self._versions = {name: (t, version_of(t)) for name, t in with_numbers.items()}
        before, self._before = self._before, seen
        changed = {name: value for name, value in seen.items() if before.get(name) != value}
        return changed | {name: "gone" for name in before if name not in seen}

    def _tensors(self, space: Space) -> Iterator[tuple[str, Any]]:
        names: dict[int, str] = {}
        if space["model"] is not None:
            for name, param in space["model"].named_parameters():
                names[id(param)] = f"model.{name}"
                yield f"model.{name}", param
                yield f"model.{name}.grad", RAW_GRAD.__get__(param)
            for name, buffer in space["model"].named_buffers():
                yield f"model.{name}", buffer
        optimizer = space["optimizer"]
        for i, group in enumerate(getattr(optimizer, "param_groups", [])):
            for j, param in enumerate(group["params"]):
                place = f"[{i}][{j}]"
                yield f"param{place} is", names.get(id(param), "itself")
                if id(param) not in names:
                    yield f"param{place}", param
                    yield f"param{place}.grad", RAW_GRAD.__get__(param)
                state = optimizer.state.get(param)
                for key, value in state.items() if isinstance(state, dict) else ():
                    yield f"state{place}[{key!r}]", value
        for number, tensor in enumerate(space["outputs"]):
            yield f"outputs[{number}]", tensor

    def _rest(self, space: Space) -> Iterator[tuple[str, str]]:
        optimizer = space["optimizer"]
        yield "optimizer", type(optimizer).__name__
        if optimizer is not None:
            yield "number of states", str(len(optimizer.state))
            for i, group in enumerate(optimizer.param_groups):
                options = {key: value for key, value in group.items() if key != "params"}
                yield f"group[{i}]", describe(options)
        yield "amp", describe(amp.state_dict())
        if space["handle"] is not None:
            yield "handle", describe(space["handle"].state_dict())


def run(program: list[str]) -> list[dict[str, Any]]:
    """Run all statements, whatever they raise."""
    torch.manual_seed(0)
    space, observer, trace = Space(), Observer(), []
    for line in program:
        trace.append({"line": line, **run_line(line, space), "changes": observer.changes(space)})
    return trace


def run_line(line: str, space: Space) -> dict[str, Any]:
    done: dict[str, Any] = {}
    printed = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        warnings.simplefilter("always")
        try:
            (statement,) = ast.parse(line).body
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), line, "eval"), space)
                with amp.disable_casts():
                    done["value"] = describe_value(value)
            else:
                exec(line, space)
        except Exception as error:
            kind = type(error)
            done["error"] = f"{kind.__module__}.{kind.__qualname__}"
            done["message"] = ADDRESS.sub("ADDRESS", str(error))
    done["warnings"] = [
        f"{w.category.__name__}: {ADDRESS.sub('ADDRESS', str(w.message))}" for w in caught
    ]
    done["printed"] = printed.getvalue()
    return done


def describe_value(value: Any) -> str | dict[str, str]:
    if isinstance(value, dict):
        return {str(key): describe(each) for key, each in value.items()}
    return describe(value)


def run_apart(program: list[str], to: int) -> None:
    """Run a program in a copy of this process, which it leaves as it was, and send the trace."""
    child = os.fork()
    if not child:
        status = 1
        try:
            with os.fdopen(to, "w") as answers:
                print(json.dumps(run(program)), file=answers)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # Without the cleaning up that the first process has to do.
    _, status = os.waitpid(child, 0)
    if status:
        died = [{"line": "the program", "died": f"status {os.waitstatus_to_exitcode(status)}"}]
        os.write(to, f"{json.dumps(died)}\n".encode())


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # What C++ prints is no answer.
    torch.set_warn_always(True)
    gc.collect()
    gc.freeze()
    os.write(answers, f"{json.dumps(apex_mp.__file__)}\n".encode())
    for line in sys.stdin:
        run_apart(json.loads(line), answers)


if __name__ == "__main__":
    main()
