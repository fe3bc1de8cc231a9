"""examples/rl: its gradient, its figures, a resumed run, and what it refuses."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.cpu_only

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "rl"
SMALL = ("--width", "32", "--layers", "2", "--prompts", "4", "--group", "4", "--device", "cpu")


@pytest.fixture
def rl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("rl_fp16")


def weights(run: Any) -> list[Tensor]:
    return [param.detach().clone() for param in run.policy.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_policy_learns(rl: ModuleType, precision: str) -> None:
    flags = ("--precision", precision, "--steps", "60", "--learning_rate", "1e-3")
    run = rl.train(rl.parse_args([*SMALL, *flags]))
    rewards = [step.reward for step in run.steps]
    # 3 seeds, 3 precisions: 0.60 at the least. At random: 0.3.
    assert sum(rewards[-10:]) / 10 > 0.5
    assert sum(rewards[:5]) / 5 < 0.4


def test_a_run_without_a_mismatch_says_so(rl: ModuleType) -> None:
    run = rl.train(rl.parse_args([*SMALL, "--precision", "bf16", "--steps", "2"]))
    results = rl.rl_compare.summarise({"bf16": [run]}, run.args)
    assert "There is no mismatch" not in rl.rl_compare.table(results)
    results["rows"][0]["largest_mismatch"] = [0.0]
    assert "There is no mismatch" in rl.rl_compare.table(results)


def test_the_gradient_is_that_of_reinforce_with_advantages_of_groups(rl: ModuleType) -> None:
    run = rl.Run(rl.parse_args([*SMALL, "--precision", "fp32"]))
    answers: list[Any] = []
    reward = run.reward
    run.reward = lambda *given: answers.append(given) or reward(*given)
    run.optimizer.step = lambda *args, **kwargs: None  # The gradients stay clipped in .grad.
    before = weights(run)
    run.train_step()
    grads = [param.grad.double() for param in run.policy.parameters()]
    assert all(map(torch.equal, weights(run), before))

    policy = run.policy.double()
    policy.zero_grad()
    prompts, drawn = (torch.tensor(each) for each in answers[0])
    rewards = torch.tensor(reward(*answers[0]), dtype=torch.float64).view(4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.01)
    total = torch.zeros((), dtype=torch.float64)
    for prompt, answer, advantage in zip(prompts, drawn, advantages.flatten(), strict=True):
        read = torch.cat([prompt, answer[:-1]]).unsqueeze(0)
        scores = policy(read, use_cache=False).logits[0, -len(answer) :].log_softmax(-1)
        total = total - advantage * scores[torch.arange(len(answer)), answer].sum()
    (total / drawn.numel()).backward()
    expected = torch.cat([param.grad.flatten() for param in policy.parameters()])
    expected *= min(1.0, 1.0 / expected.norm())
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), expected, rtol=0, atol=1e-6)
    assert expected.abs().max() > 0.01


def test_a_sampled_token_is_drawn_by_the_log_probability_that_is_returned(rl: ModuleType) -> None:
    run = rl.Run(rl.parse_args([*SMALL, "--precision", "fp32"]))
    prompts = torch.full((4000, 1), 3)
    tokens, log_probs = rl.sample(run.policy, prompts, 2, run.generator)
    first = run.policy(prompts[:1]).logits[0, -1].softmax(-1)
    shares = tokens[:, 0].bincount(minlength=10) / 4000
    # Standard deviations are 0.008 at the most.
    torch.testing.assert_close(shares, first.detach(), rtol=0, atol=0.04)
    whole = rl.log_probabilities(run.policy, prompts, tokens).detach()
    torch.testing.assert_close(log_probs, whole, rtol=0, atol=1e-5)


def test_a_resumed_run_goes_on_to_the_bit(rl: ModuleType, tmp_path: Path) -> None:
    flags = (*SMALL, "--loss_scale", str(2.0**22))  # The first steps are skipped.
    file = str(tmp_path / "new" / "rl.pt")
    rl.train(rl.parse_args([*flags, "--steps", "6", "--save", file]))
    resumed = rl.train(rl.parse_args([*flags, "--steps", "12", "--resume", file]))
    whole = rl.train(rl.parse_args([*flags, "--steps", "12"]))
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert 0 < sum(step.skipped for step in whole.steps) < 6

    def figures(run: Any) -> list[tuple[Any, ...]]:
        return [(step.reward, step.mismatch, step.scale, step.skipped) for step in run.steps]

    assert figures(resumed) == figures(whole)


def test_the_comparison_has_a_table_figures_and_a_picture(
    rl: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rl.json"
    flags = ("--compare", "--seeds", "2", "--steps", "3", "--save-results", str(file))
    rl.main([*SMALL, *flags])
    results = json.loads(file.read_text())
    names = ["fp32", "fp16", "bf16", "bf16, no masters"]
    assert [row["run"] for row in results["rows"]] == names
    assert all(len(row["reward"]) == 2 for row in results["rows"])
    assert [row["scale"] for row in results["rows"]] == [
        [None] * 2,
        [65536.0] * 2,
        *[[None] * 2] * 2,
    ]
    curves = results["curves"]["bf16"]["mismatch"]
    assert results["rows"][2]["mismatch"] == pytest.approx([sum(c) / 3 for c in curves], rel=1e-3)
    assert file.with_suffix(".png").stat().st_size > 10_000
    head, _, *lines = capsys.readouterr().out.strip().split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["", *names]
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines}
    assert [cell.strip() for cell in cells["final scale"]] == ["none", "2^16", "none", "none"]
    assert [float(cell) for cell in cells["mismatch"]] == pytest.approx(
        [sum(row["mismatch"]) / 2 for row in results["rows"]], rel=0.05
    )
    assert len(cells["2 seeds"]) == 4


def test_the_page_shows_the_table_of_the_committed_figures(rl: ModuleType) -> None:
    folder = FOLDER.parents[1] / "benchmarks" / "results"
    shown = json.loads((folder / "recipes" / "rl_fp16.json").read_text())["blocks"][0]
    results = json.loads((folder / "rl-fp16-cpu.json").read_text())
    assert rl.rl_compare.table(results) in shown["output"]


def test_the_loop_on_the_page_trains(rl: ModuleType) -> None:
    page = (FOLDER.parents[1] / "docs" / "recipes" / "rl_fp16.md").read_text()
    (loop,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run = rl.Run(rl.parse_args([*SMALL]))
    sent: list[dict[str, Tensor]] = []

    def draw(policy: Any) -> tuple[Tensor, ...]:
        prompts = rl.rl_task.prompts(64, run.generator)
        return prompts, *rl.sample(policy, prompts, 4, run.generator)

    def loss_of(policy: Any, prompts: Tensor, answers: Tensor, drawn: Tensor) -> Tensor:
        wish = (answers == 7).float() - 0.1
        return -(wish * (rl.log_probabilities(policy, prompts, answers) - drawn).exp()).mean()

    there = {"policy": run.policy, "device": "cpu", "steps": 150, "draw": draw}
    exec(loop, there | {"loss_of": loss_of, "send": lambda state: sent.append(state)})
    assert (draw(run.policy)[1] == 7).float().mean() > 0.5
    assert {weight.dtype for weight in sent[-1].values()} == {torch.float16}


# What it refuses.


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1.0] * 15, "the reward returned 15 values for 16 answers"),
        ([1.0] * 15 + [math.nan], "the reward of answer 15 is nan; it must be a finite number"),
        (["good"] * 16, "the reward of answer 0 is 'good'; it must be a finite number"),
        ([None] * 16, "the reward of answer 0 is None"),
    ],
)
def test_a_wrong_reward_is_a_sentence(rl: ModuleType, values: Sequence[Any], sentence: str) -> None:
    run = rl.Run(rl.parse_args([*SMALL]), lambda prompts, answers: values)
    before = weights(run)
    with pytest.raises(ValueError, match=sentence):
        run.train_step()
    assert all(map(torch.equal, weights(run), before))
