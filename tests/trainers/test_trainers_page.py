"""docs/trainers.md: its code trains, and the versions it names are installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tasks
import test_timm
import test_transformers
import torch
import trl_cases
from datasets import Dataset

import apex_mp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("accelerate_state")]
FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "trainers.md").read_text(encoding="utf-8")
ACCELERATE, TRANSFORMERS, TRL, LIGHTNING, BY_HAND, TIMM, PEFT = re.findall(
    r"```python\n(.*?)```", PAGE, re.DOTALL
)


def test_the_page_names_the_versions_that_are_installed() -> None:
    pins = (FOLDER / "requirements.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)$", pins, re.MULTILINE))
    named = re.findall(
        r"(accelerate|transformers|pytorch-lightning|timm|peft|trl) ([\d.]+\d)", PAGE
    )
    assert dict(named) == {name: pinned[name] for name, _ in named}
    assert len(named) == 6
    assert pinned["lightning"] == pinned["pytorch-lightning"]


def loss_on(model: Any, dtype: torch.dtype = torch.float16) -> float:
    with torch.no_grad():
        losses = [tasks.loss_of(model, batch).item() for batch in tasks.batches(16)]
    return sum(losses) / len(losses)


def loader(steps: int = tasks.STEPS) -> Any:
    return torch.utils.data.DataLoader(tasks.batches(steps), batch_size=None)


def test_the_loop_with_accelerate_trains() -> None:
    there: dict[str, Any] = {"torch": torch, "model": tasks.model(), "loader": loader()}
    before = loss_on(there["model"])
    exec(ACCELERATE, there)
    assert loss_on(there["model"]) < 0.5 * before
    assert there["scheduler"].get_last_lr()[0] == pytest.approx(1e-2 * 0.99 ** (tasks.STEPS // 2))


def test_the_trainer_of_trl_trains(tmp_path: Path) -> None:
    there: dict[str, Any] = {
        "model": trl_cases.llama(),
        "tokenizer": trl_cases.with_trl.tokenizer(),
        "reward": trl_cases.sevens,
        "dataset": Dataset.from_list(trl_cases.PROMPTS * 2),
        "folder": tmp_path,
    }
    small = "num_generations=8, max_completion_length=6, logging_steps=1, max_steps=60, "
    exec(TRL.replace("report_to=", f"{small}report_to="), there)
    history = there["trainer"].state.log_history
    rewards = [float(row["reward"]) for row in history if "reward" in row]
    assert sum(rewards[-20:]) > 2 * sum(rewards[:20])
    assert there["model"].dtype == torch.float16


def test_the_trainer_of_transformers_trains(tmp_path: Path) -> None:
    data = test_transformers.sequences()
    there: dict[str, Any] = {"model": test_transformers.bert(), "dataset": data, "folder": tmp_path}
    exec(TRANSFORMERS, there)
    history = there["trainer"].state.log_history
    assert float(history[-1]["train_loss"]) < 0.75  # ln 2 is that of a guess.
    assert history[-1]["loss_scale"] == 2.0**10
    assert there["trainer"].accelerator.scaler._get_growth_tracker() == 3 * 256 // 8


@pytest.mark.parametrize(("block", "name"), [(LIGHTNING, "Classifier"), (BY_HAND, "ByHand")])
def test_the_modules_of_lightning_train(block: str, name: str, tmp_path: Path) -> None:
    there: dict[str, Any] = {"torch": torch, "folder": tmp_path, "loader": loader()}
    quiet = "lightning.Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False,"
    exec(block.replace("lightning.Trainer(", quiet), there)
    trained = there["trainer"].lightning_module
    assert type(trained).__name__ == name
    if block is LIGHTNING:
        assert there["trainer"].callback_metrics["loss_scale"] == 2.0**16
    untrained = there[name]()
    assert loss_on(trained.net) < 0.6 * loss_on(untrained.net)


def test_timm_makes_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    test_timm.declare()
    monkeypatch.syspath_prepend(test_timm.TORCHVISION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there: dict[str, Any] = {"model": tasks.model()}
    exec(TIMM, there)
    apex_mp.uninstall_as_apex()
    assert isinstance(there["optimizer"], apex_mp.optimizers.FusedAdam)


def test_the_loop_with_peft_trains() -> None:
    data = test_transformers.sequences(64)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    there: dict[str, Any] = {"model": test_transformers.bert(), "batches": [batch] * 20}
    exec(PEFT, there)
    assert there["scaler"].get_scale() == 2.0**10
    assert len(there["optimizer"].state) == 4  # two adapters of two matrices each


def example(name: str) -> Callable[..., float]:
    path = FOLDER.parents[1] / "examples" / "trainers" / f"{name}.py"
    there: dict[str, Any] = {"__name__": name, "__file__": path}
    exec(compile(path.read_text(), path, "exec"), there)
    main: Callable[..., float] = there["main"]
    return main


@pytest.mark.parametrize(
    ("name", "arguments", "least"),
    [
        ("with_accelerate", [], 0.8),
        ("with_lightning", ["16-mixed"], 0.8),
        ("with_lightning", ["16-true"], 0.8),
        ("with_transformers", [], 0.9),
    ],
)
def test_the_examples_learn(name: str, arguments: list[str], least: float) -> None:
    assert example(name)(*arguments) > least


def test_the_example_of_trl_learns_by_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    train = example("with_trl")
    assert train("grpo") > 0.9
    assert train("sft") < 0.1
    assert train("dpo") < 0.1
    with pytest.raises(SystemExit, match="'ppo'; it must be grpo, sft or dpo"):
        train("ppo")


def test_the_example_of_trl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match="this example needs: pip install trl"):
        example("with_trl")
