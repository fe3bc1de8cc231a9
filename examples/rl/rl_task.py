"""What the policy of rl_fp16.py is rewarded for. The prompts are made, nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DIGITS = 10
# Takes prompts and answers as lists of tokens, and returns a number for each answer.
Reward = Callable[[list[list[int]], list[list[int]]], Sequence[float]]


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return `count` prompts of one digit each, int64 of shape [count, 1]."""
    return torch.randint(DIGITS, (count, 1), generator=generator, device=generator.device)


def reward(prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """Return for each answer the share of digits that are 1 to 3 above the one before, modulo 10.

    Three of ten digits are right, so a random answer gets 0.3, and a good policy has a choice left.
    """
    rewards = []
    for prompt, answer in zip(prompts, answers, strict=True):
        before = [prompt[-1], *answer[:-1]]
        steps = [(one - other) % DIGITS for one, other in zip(answer, before, strict=True)]
        rewards.append(sum(1 <= step <= 3 for step in steps) / len(answer))
    return rewards


def checked(rewards: Sequence[float], count: int) -> list[float]:
    """Return the rewards, if they are `count` finite numbers.

    Raises:
        ValueError: They are not. A NaN would make all advantages of its group NaN, and the
            scaler would skip each step without end.
    """
    if len(rewards) != count:
        raise ValueError(f"the reward returned {len(rewards)} values for {count} answers")
    for index, value in enumerate(rewards):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(
                f"the reward of answer {index} is {value!r}; it must be a finite number"
            )
    return [float(value) for value in rewards]
