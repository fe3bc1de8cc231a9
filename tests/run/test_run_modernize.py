"""`--modernize`: each thing that it supplies, what it says of it, and that it can be undone."""

from __future__ import annotations

import argparse
import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from modernize_cases import CASES, IGNORED, XX, X, said, scheduler, written
from torch import Tensor, nn
from torch.jit import _builtins

from apex_mp import amp
from apex_mp._run import cpu, hints, launched, modernize
from apex_mp._run.modernize import notes, source
from apex_mp._run.replacements import Replacements
from apex_mp._run.settings import Settings

pytestmark = pytest.mark.cpu_only

SLOT = type(object.__repr__)  # a method that is a slot of a class in C


@pytest.fixture
def modern() -> Iterator[Replacements]:
    replacements = Replacements()
    notes.forget()
    modernize.supply(replacements)
    yield replacements
    replacements.undo()


@pytest.fixture(params=[False, True], ids=["alone", "with --device cpu"])
def modern_anywhere(request: pytest.FixtureRequest, modern: Replacements) -> None:
    if request.param:
        cpu.redirect(modern)


@pytest.mark.usefixtures("modern_anywhere")
@pytest.mark.parametrize(("say", "get", "line"), CASES)
def test_the_script_gets_what_it_got_then_and_hears_of_it_once(
    say: Callable[[], Any], get: Any, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say() == get
    said = capsys.readouterr()
    assert said.out == ""
    assert line in said.err
    assert all(text.startswith("apex_mp run: --modernize: ") for text in said.err.splitlines())
    say()
    assert capsys.readouterr().err == ""


def outcome(say: Callable[[], Any]) -> Any:
    try:
        return say()
    except (Exception, SystemExit) as error:
        return error


# Each in words of its own: (it says nothing of schedulers; argparse exits, see test_run.py)
NO_HINT = ('can only concatenate str (not "float") to str', "2")


@pytest.mark.parametrize(("say", "get", "line"), CASES)
def test_without_it_the_script_gets_something_else_and_an_error_says_what_helps(
    say: Callable[[], Any], get: Any, line: str
) -> None:
    error = outcome(say)
    assert error != get  # So that this list shrinks when torch, or Python, changes.
    if not isinstance(error, BaseException) or isinstance(error, Warning) or str(error) in NO_HINT:
        return
    hint = hints.line_for(error, Settings())
    assert hint is not None
    assert hint.startswith("apex_mp run: --modernize supplies this: ")
    assert hints.line_for(error, Settings(modernize=True)) is None


# What must stay as it is: (what a new script says, what it gets)
UNTOUCHED: list[tuple[Callable[[], Any], Any]] = [
    (lambda: torch.full((1,), 3, dtype=torch.int64).dtype, torch.int64),
    (lambda: torch.full((1,), 3.0).dtype, torch.float32),
    (lambda: (~torch.tensor([2, 1], dtype=torch.uint8)).tolist(), [253, 254]),
    (lambda: (~(X > 1)).tolist(), [True, False, False]),
    (lambda: (X - 1).tolist(), [0, 1, 2]),
    (lambda: X.masked_fill(X > 2, 0).tolist(), [1, 2, 0]),
    (lambda: X.view(3, 1).shape, (3, 1)),
    (lambda: X[0].item(), 1.0),
    (lambda: X[torch.tensor([0, 2])].tolist(), [1, 3]),
    (lambda: X[X > 1].tolist(), [2, 3]),
    (lambda: X[numpy.array([0, 2])].tolist(), [1, 3]),
    (lambda: (XX[:, [0, 2]].tolist(), XX[..., None, 0].tolist()), ([[0, 2], [3, 5]], [[0], [3]])),
    (lambda: torch.tensor(2.0)[None].tolist(), [2]),
    (lambda: torch.tensor(2.0)[torch.tensor(0) == 0].tolist(), [2]),
    (lambda: written(X, X > 1, 9), [1, 9, 9]),
    (lambda: written(XX, (slice(None), 0), X[:2]), [[1, 1, 2], [2, 4, 5]]),
    (lambda: X.view(torch.int32).dtype, torch.int32),
    (lambda: torch.div(torch.tensor([7]), 2).tolist(), [3.5]),
    (lambda: torch.div(torch.tensor([7]), 2, out=torch.empty(1)).tolist(), [3.5]),
    (lambda: torch.tensor([-7]).div_(2, rounding_mode="floor").tolist(), [-4]),
    (lambda: torch.tensor([7.0]).div_(2).tolist(), [3.5]),
    (lambda: scheduler("StepLR", 3).gamma, 0.1),
    (lambda: nn.functional.nll_loss(-torch.eye(2), torch.tensor([0, -100])).item(), 1.0),
]


@pytest.mark.usefixtures("modern")
@pytest.mark.parametrize(("say", "get"), UNTOUCHED)
def test_what_needs_nothing_is_left_alone_in_silence(
    say: Callable[[], Any], get: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say() == get
    assert capsys.readouterr().err == ""


def test_gradients_that_are_gone_are_a_matter_of_zero_grad() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(AttributeError) as of_grad:
        weight.grad.zero_()  # type: ignore[union-attr]
    with pytest.raises(AttributeError) as of_else:
        None.zero_()  # type: ignore[attr-defined]
    hint = hints.line_for(of_grad.value, Settings())
    assert hint is not None
    assert "gradients that zero_grad() sets to zero, not None" in hint
    assert hints.line_for(of_else.value, Settings()) is None


@pytest.mark.usefixtures("modern")
def test_the_zero_loss_of_no_target_can_be_trained_on() -> None:
    scores = torch.full((2, 3), math.inf, requires_grad=True)
    loss = nn.functional.cross_entropy(scores, IGNORED)
    assert loss.item() == 0.0
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0.0] * 3] * 2


# Packages that a script may import; these have what is left in those of today.
PACKAGES = {
    "yaml.py": "class FullLoader: pass\ndef load(stream, Loader): return stream, Loader.__name__\n",
    "PIL/__init__.py": "",
    "PIL/Image.py": "LANCZOS, BILINEAR, BICUBIC = 1, 2, 3\n",
    "transformers/__init__.py": """
import sys, types
class Lazy(types.ModuleType):
    __path__ = __path__
sys.modules[__name__] = Lazy(__name__)
""",
    "transformers/optimization.py": "",
}


@pytest.mark.parametrize("imported_before", [False, True])
def test_packages_have_what_they_dropped(
    imported_before: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("yaml", "PIL", "PIL.Image", "transformers", "transformers.optimization")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for file, text in PACKAGES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    replacements = Replacements()
    notes.forget()
    if imported_before:
        for name in names:
            importlib.import_module(name)
    modernize.supply(replacements)
    yaml, image, transformers, optimization = (
        importlib.import_module(names[number]) for number in (0, 2, 3, 4)
    )
    assert yaml.load("a") == ("a", "FullLoader")
    assert yaml.load("a", int) == ("a", "int")
    assert (image.ANTIALIAS, image.LINEAR, image.CUBIC) == (1, 2, 3)
    weight = nn.Parameter(torch.ones(1))
    for module in (transformers, optimization):
        adamw = module.AdamW([weight], lr=0.5, correct_bias=False)
        assert adamw.defaults["eps"] == 1e-6
    weight.grad = torch.ones(1)
    adamw.step()  # 0.1 and 0.001 are not corrected
    assert weight.item() == pytest.approx(1 - 0.5 * 0.1 / 0.001**0.5, rel=1e-4)
    said = capsys.readouterr().err
    assert "yaml.load without a Loader: is yaml.full_load" in said
    assert "transformers.AdamW: is apex_mp.optimizers.FusedAdam" in said
    replacements.undo()
    assert not hasattr(transformers, "AdamW")
    assert not hasattr(image, "ANTIALIAS")
    assert sys.meta_path == finders
    for name in names:
        del sys.modules[name]


def test_an_error_in_another_operation_on_integers_is_a_matter_of_full() -> None:
    numbers = torch.full((2,), 1)
    with pytest.raises(RuntimeError) as error:
        numbers.mul_(0.5)
    hint = hints.line_for(error.value, Settings())
    assert hint is not None
    assert "torch.full of an int" in hint
    with pytest.raises(RuntimeError) as error:
        numbers /= 2
    assert "division of integers" in str(hints.line_for(error.value, Settings()))


@pytest.mark.parametrize("words", [["--local-rank=2"], ["--local-rank", "2"], ["--local_rank=2"]])
def test_a_script_is_given_the_local_rank_that_it_declares(words: list[str]) -> None:
    replacements = Replacements()
    launched.accept_local_rank(replacements)
    for option in ("--local_rank", "--local-rank"):
        parser = argparse.ArgumentParser()
        parser.add_argument(option, type=int)
        if option == "--local_rank" or words != ["--local_rank=2"]:
            assert parser.parse_args(words).local_rank == 2
    replacements.undo()


class Recorded(Replacements):
    """Replacements that know what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[tuple[Any, str], Any] = {}

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.before.setdefault((owner, name), vars(owner).get(name))
        super().set(owner, name, value)


@pytest.fixture
def replaced() -> Iterator[Recorded]:
    replacements = Recorded()
    modernize.supply(replacements)
    cpu.redirect(replacements)
    yield replacements
    replacements.undo()


def where(x: Tensor) -> Tensor:
    return torch.where(x > 1, x, -x)


def full(x: Tensor) -> Tensor:
    return torch.full([2], 3.0) + x


def zeros(x: Tensor) -> Tensor:
    return torch.zeros([2], device=x.device) + x.to(torch.device("cpu"))


def masked_fill(x: Tensor) -> Tensor:
    return torch.masked_fill(x, x > 1, 0.0) + x.masked_fill(x > 1, 5.0)


def div(x: Tensor) -> Tensor:
    return torch.div(x, 2.0).view(2, 1)


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x[None], torch.ones([1], dtype=torch.long))


def linear(x: Tensor) -> Tensor:
    return F.linear(x, x[None]) + torch.matmul(x, x)


FUNCTIONS = (where, full, zeros, masked_fill, div, cross_entropy, linear)


@pytest.mark.parametrize("with_amp", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.usefixtures("replaced")
def test_a_function_is_compiled_and_says_the_same(
    function: Callable[[Tensor], Tensor], with_amp: bool
) -> None:
    x = torch.tensor([1.0, 2.0])
    expected = function(x)
    handle = amp.init(enabled=with_amp)
    compiled = torch.jit.script(function)
    assert torch.equal(compiled(x).float(), expected)
    handle._deactivate()


def test_each_replacement_is_compiled_as_what_was_there(replaced: Recorded) -> None:
    operators, functions = 0, 0
    for (owner, name), before in replaced.before.items():
        if before is None or not isinstance(owner, ModuleType):
            continue
        now = getattr(owner, name)
        operator = _builtins._find_builtin(before)  # type: ignore[no-untyped-call]
        if operator is not None:
            assert _builtins._find_builtin(now) == operator, name  # type: ignore[no-untyped-call]
            operators += 1
        elif getattr(now, "__wrapped__", None) is before:
            assert now.__prepare_scriptable__() is before, name  # type: ignore[attr-defined]
            functions += 1
    assert operators > 30
    assert functions > 3


def test_nothing_of_it_is_left() -> None:
    known = dict(_builtins._builtin_table or {})
    replacements = Replacements()
    modernize.supply(replacements)
    cpu.redirect(replacements)
    assert len(_builtins._builtin_table or ()) > len(known)
    replacements.undo()
    assert known == _builtins._builtin_table


def test_no_slot_of_a_class_in_c_is_replaced(modern: Replacements) -> None:
    """A Python method in the place of a slot makes torch take numbers for sequences."""
    codes = {name: getattr(value, "__code__", None) for name, value in vars(Tensor).items()}
    named = {name for name, code in codes.items() if code and "modernize" in code.co_filename}
    assert {name for name in named if name.startswith("__")} == {
        *("__iadd__", "__imul__", "__isub__", "__itruediv__"),
        *("__invert__", "__rsub__", "__sub__"),
    }
    slots = (name for name in dir(Tensor) if type(getattr(torch._C.TensorBase, name, None)) is SLOT)
    assert {"__getitem__", "__setitem__"} <= {*slots}
    for name in ("__getitem__", "__setitem__"):
        assert getattr(Tensor, name) is getattr(torch._C.TensorBase, name)
    numbers = [X[1], X[2]]
    made = torch.tensor(numbers), torch.as_tensor(numbers), torch.FloatTensor(numbers)
    assert [one.tolist() for one in (*made, X.new_tensor(numbers))] == [[2.0, 3.0]] * 4


def test_a_source_is_compiled_with_its_meaning(modern: Replacements) -> None:
    text = """
from __future__ import annotations
import ast
log = []
class Odd(dict):
    def fill_(self, *values, **named):
        log.append((values, named))
    def __missing__(self, key):
        log.append(key)
        return [key]
def one(value):
    log.append(value)
    return value
odd = Odd()
odd[one("a")] += one(["b"])
odd[one(1), one(2), ...] = one(4)
odd.fill_(*[5], **{"six": 7})
x = y = [1, 2]
x[0], y[1] = x[1], y[0]
x[-1:] += [8]
x[one(0) : one(1)] = one([9, 9])
def annotated(x: Literal[0]) -> Tuple[0]:
    a: List[0] = x[0]
    return a
got = log, dict(odd), x, annotated.__annotations__, annotated("z")
"""
    modern_way = said(text)
    plain: dict[str, Any] = {}
    exec(text, plain)
    assert modern_way == plain["got"]


def test_a_name_of_early_python_is_replaced_where_it_stands() -> None:
    text = (
        "# caf\u00e9\r\n\x0c\n"
        "x.cuda(async=True); y = 'async='\n"
        "async def f(async=1): return async\n"
    )
    expected = text.replace("(async", "(non_blocking")
    expected = expected.replace("return async", "return non_blocking")
    assert source.without_async(text.encode()) == expected
    assert source.without_async(b"async def f():\n    async with x: pass\n") is None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "child", "spawn"])
def test_sources_are_compiled_in_each_process(way: str, tmp_path: Path) -> None:
    (tmp_path / "used.py").write_text("def number(loss):\n    return loss.data[0]\n")
    (tmp_path / "work.py").write_text(
        "import sys, torch, used\n"
        "def work(_=None):\n"
        "    x = torch.zeros(2).copy_(torch.ones(2), async=True)\n"
        "    x[torch.tensor([1, 0], dtype=torch.uint8)] = 3\n"
        "    print('worked', used.number(x.sum()), sys.argv[1:], __file__ == sys.argv[0])\n"
        "if __name__ == '__main__':\n"
        "    if 'spawn' in sys.argv:\n"
        "        import multiprocessing\n"
        "        process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "        process.start(); process.join()\n"
        "    else:\n"
        "        work()\n"
    )
    (tmp_path / "start.py").write_text(
        "import subprocess, sys, torch\nsubprocess.check_call([sys.executable, *sys.argv[1:]])\n"
    )
    script = str(tmp_path / "work.py")
    arguments = [script, way] if way != "child" else [str(tmp_path / "start.py"), script, way]
    command = [sys.executable, "-m", "apex_mp", "run", "--modernize", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"worked 4.0 ['{way}'] True" in done.stdout, done.stderr
    assert not [*tmp_path.rglob("*.pyc")]
