"""Arguments of torch's launchers, spelled as old scripts know them."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from apex_mp._run.replacements import Replacements


def accept_local_rank(replacements: Replacements) -> None:
    """Make argparse accept --local-rank if a script declares only --local_rank."""
    parse = argparse.ArgumentParser.parse_known_args
    replacements.set(argparse.ArgumentParser, "parse_known_args", _with_old_spelling(parse))


def _with_old_spelling(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parse_known_args(
        self: argparse.ArgumentParser,
        args: Sequence[str] | None = None,
        namespace: Any = None,
    ) -> Any:
        known = self._option_string_actions
        words = sys.argv[1:] if args is None else [*args]
        if "--local_rank" in known and "--local-rank" not in known:
            for index, word in enumerate(words):
                if word.partition("=")[0] == "--local-rank":
                    words[index] = word.replace("--local-rank", "--local_rank", 1)
        return parse(self, words, namespace)

    return parse_known_args
