"""What nvdisasm prints of a kernel: its basic blocks, and the loops in which it takes vectors.

A vector loop computes in float and accesses memory in 128 bits or more, apart from loops inside it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_FUNCTION = re.compile(r'subgraph "cluster_(.+)" {')
_BLOCK = re.compile(r'"([^"]+)"\n\[label="(.*)"\]')
_EDGE = re.compile(r'"([^"]+)":\w+:\w -> "([^"]+)":')
_INSTRUCTION = re.compile(r"[0-9a-f]{4,}: +(?:@!?U?P\w+ +)?([A-Z]\w*(?:\.\w+)*)")

_ACCESS = re.compile(r"(?:LD|ST|LDG|STG)(?:\.|$)")
_GENERIC = re.compile(r"(?:LD|ST)(?:\.|$)")
_LOCAL = re.compile(r"(?:LDL|STL)(?:\.|$)")
_WIDE = re.compile(r"\.(?:128|256)(?:\.|$)")
_DOUBLE_WORD = re.compile(r"\.64(?:\.|$)")
_FLOAT_MATH = re.compile(r"F(?:ADD|MUL|FMA)2?(?:\.|$)")
_FROM_HALF = re.compile(r"HADD2\.F32")


@dataclass
class Function:
    """Opcodes of each basic block, and which blocks may follow it."""

    blocks: dict[str, list[str]] = field(default_factory=dict)
    next: dict[str, list[str]] = field(default_factory=dict)

    def opcodes(self, blocks: Iterable[str] | None = None) -> list[str]:
        """Return the opcodes of some blocks, or of all."""
        return [code for block in blocks or self.blocks for code in self.blocks[block]]


class Loop(NamedTuple):
    """Where a loop is entered, and its blocks, without those of loops inside it."""

    heads: set[str]
    blocks: set[str]


def functions_in(graph: str) -> dict[str, Function]:
    """Return the functions of `nvdisasm -bbcfg -poff` by their names."""
    pieces = _FUNCTION.split(graph)[1:]
    found = {}
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):
        function = found[name] = Function()
        for block, label in _BLOCK.findall(text):
            function.blocks[block] = _INSTRUCTION.findall(label.replace("\\ ", " "))
            function.next[block] = []
        for block, following in _EDGE.findall(text):
            function.next[block].append(following)
    return found


def facts_of(function: Function) -> dict[str, Any]:
    """Return how many instructions there are, those that access local memory, and the loops."""
    opcodes = function.opcodes()
    return {
        "instructions": len(opcodes),
        "local": sum(map(bool, map(_LOCAL.match, opcodes))),
        "loops": [loop_facts(function, loop) for loop in vector_loops(function)],
    }


def loop_facts(function: Function, loop: Loop) -> dict[str, int]:
    """Return what a vector loop holds, and the fewest instructions of a turn that reads fp16."""
    opcodes = function.opcodes(loop.blocks)
    accesses = [code for code in opcodes if _ACCESS.match(code)]
    turn = shortest_turn(function, loop, _FROM_HALF)
    return {
        "instructions": len(opcodes),
        "loads": sum(code.startswith("LD") for code in accesses),
        "stores": sum(code.startswith("ST") for code in accesses),
        "b64": sum(map(bool, map(_DOUBLE_WORD.search, accesses))),
        "scalar": sum(not (_WIDE.search(code) or _DOUBLE_WORD.search(code)) for code in accesses),
        "generic": sum(map(bool, map(_GENERIC.match, accesses))),
        "fp16_turn": len(turn),
        "fp16_turn_accesses": sum(map(bool, map(_ACCESS.match, turn))),
    }


def vector_loops(function: Function) -> list[Loop]:
    """Return the vector loops in the order of their code."""
    loops = [
        loop
        for loop in loops_in(function.next)
        if any(map(_FLOAT_MATH.match, opcodes := function.opcodes(loop.blocks)))
        and any(_ACCESS.match(code) and _WIDE.search(code) for code in opcodes)
    ]
    order = list(function.blocks)
    return sorted(loops, key=lambda loop: min(map(order.index, loop.blocks)))


def loops_in(following: Mapping[str, list[str]]) -> Iterator[Loop]:
    """Yield the loops of a graph, the inner ones first."""
    for component in strong_components(following):
        heads = entries(following, component) or {min(component)}
        # Without the edges back to where the loop is entered, only inner loops are left.
        inside = {
            block: [each for each in following[block] if each in component - heads]
            for block in following
            if block in component
        }
        inner = list(loops_in(inside))
        yield from inner
        yield Loop(heads, component.difference(*(loop.blocks for loop in inner)))


def entries(following: Mapping[str, list[str]], loop: set[str]) -> set[str]:
    """Return the blocks of a loop that are reached from elsewhere."""
    return {
        each
        for block in following
        if block not in loop
        for each in following[block]
        if each in loop
    }


def strong_components(following: Mapping[str, list[str]]) -> list[set[str]]:
    """Return the sets of blocks from each of which all others, and itself, can be reached."""
    reached = {block: reachable(following, block) for block in following}
    found: list[set[str]] = []
    for block in following:
        if block in reached[block] and not any(block in component for component in found):
            found.append({each for each in reached[block] if block in reached[each]})
    return found


def reachable(following: Mapping[str, list[str]], start: str) -> set[str]:
    """Return the blocks that are reached from one by at least one step."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        steps = [each for each in following[waiting.pop()] if each not in found]
        found.update(steps)
        waiting += steps
    return found


def shortest_turn(function: Function, loop: Loop, wanted: re.Pattern[str]) -> list[str]:
    """Return the opcodes of the shortest way around a loop that meets a wanted one, or none."""
    heads, others = loop.heads, loop.blocks - loop.heads

    @functools.cache
    def rest(block: str, met: bool) -> list[str] | None:
        codes = function.blocks[block]
        met = met or any(map(wanted.match, codes))
        ways = [[] if met else None for each in function.next[block] if each in heads]
        ways += [rest(each, met) for each in function.next[block] if each in others]
        return min(([*codes, *way] for way in ways if way is not None), key=len, default=None)

    return min((way for head in heads if (way := rest(head, False))), key=len, default=[])
