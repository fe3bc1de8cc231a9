"""torch.jit.script compiles what calls a function that a run has replaced, as without the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.jit import _builtins

from apex_mp import amp
from apex_mp._run import cpu, modernize
from apex_mp._run.replacements import Replacements

pytestmark = pytest.mark.cpu_only


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
