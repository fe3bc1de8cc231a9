"""TRL's trainers with a half model: as fp32, as a loop by hand, and what a skipped step leaves."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import TrainerCallback
from trl_cases import EPS, INIT_SCALE, LR, STEPS, in_fp16, in_fp32, llama, make

from apex_mp import convert
from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("accelerate_state"),
    pytest.mark.filterwarnings("ignore:.*buffers have no masters"),
]
kinds = pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])


def trained(trainer: Any) -> Any:
    trainer.train()  # Before another is made, which seeds all random numbers.
    return trainer


def logged(run: Any, name: str) -> Tensor:
    return torch.tensor([float(row[name]) for row in run.state.log_history if name in row])


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def unrounded(run: Any) -> Tensor:
    """Masters, or the weights that have none."""
    return flat(map(run.optimizer.optimizer.master, trainable(run.model)))


def assert_same_course(run: Any, expected: Any, start: Tensor) -> None:
    # 3 kinds, 4 settings: 0.0013 and 0.003 at the most. A rate that is a fifth larger: 0.05, 0.18.
    norms = [logged(each, "grad_norm") for each in (run, expected)]
    assert len(norms[0]) == STEPS
    torch.testing.assert_close(*norms, rtol=0.005, atol=0)
    moved, wanted = unrounded(run) - start, flat(trainable(expected.model)) - start
    assert (moved - wanted).norm() < 0.01 * wanted.norm()


@kinds
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"max_grad_norm": 0.1},
        {"gradient_checkpointing": True},
    ],
    ids=["plain", "accumulation", "clipping", "checkpointing"],
)
def test_a_half_model_learns_as_in_fp32(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    half, wide = llama().half(), llama().half().float()
    start = flat(wide.parameters())
    run = trained(in_fp16(kind, half, tmp_path, **options))
    expected = trained(in_fp32(kind, wide, tmp_path, **options))
    assert {param.dtype for param in half.parameters()} == {torch.float16}
    assert_same_course(run, expected, start)
    masters = convert.masters(half, run.optimizer.optimizer)
    assert torch.equal(flat(masters[name] for name, _ in half.named_parameters()), unrounded(run))


# A loop by hand.


def sft_loss(model: Any, frozen: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def dpo_loss(model: Any, frozen: Any, batch: Any) -> Tensor:
    mask = batch["completion_mask"][:, 1:]
    sums = (log_probs(model, batch["input_ids"]) * mask).sum(1)
    with torch.no_grad():
        of_frozen = (log_probs(frozen, batch["input_ids"]) * mask).sum(1)
    chosen, rejected = (sums - of_frozen).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo_loss(model: Any, frozen: Any, batch: Any) -> Tensor:
    answers, mask = batch["completion_ids"], batch["completion_mask"]
    tokens = torch.cat([batch["prompt_ids"], answers], 1)
    trained = log_probs(model, tokens)[:, -answers.shape[1] :]
    each = -(trained - trained.detach()).exp() * batch["advantages"][:, None]
    return (each * mask).sum() / mask.sum()


LOSSES = {"SFT": sft_loss, "DPO": dpo_loss, "GRPO": grpo_loss}


@kinds
def test_a_half_model_learns_as_in_a_loop_by_hand(kind: str, tmp_path: Path) -> None:
    run = in_fp16(kind, llama().half(), tmp_path, max_grad_norm=0.5)
    batches: list[Any] = []
    compute_loss = run.compute_loss

    def noted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(copy.deepcopy(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    run.compute_loss = noted
    run.train()

    model, frozen = llama().half(), llama().half()
    start = flat(model.parameters())
    optimizer = FusedAdam(model.parameters(), lr=LR, eps=EPS, master_weights=True)
    scaler = GradScaler("cpu", INIT_SCALE)
    norms = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.zero_grad()
        scaler.scale(LOSSES[kind](model, frozen, batch)).backward()
        norms.append(float(scaler.clip_grad_norm_(optimizer, 0.5)))
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(logged(run, "grad_norm"), torch.tensor(norms), rtol=0.002, atol=0)
    moved = unrounded(run) - start
    by_hand = flat(optimizer.master(p) for p in model.parameters()) - start
    assert (moved - by_hand).norm() < 0.002 * by_hand.norm()


# A skipped step.


class Notes(TrainerCallback):
    """Weights, rates and reports after each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.rates: list[float] = []
        self.reports: list[list[str]] = []
        self.scaler: Any = None

    def on_step_end(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.weights.append(flat(model.parameters()))
        self.rates.append(optimizer.param_groups[0]["lr"] / LR)
        self.reports.append([str(r) for r in self.scaler.overflow_report(optimizer.optimizer)])


def with_inf(model: Any, at: int) -> Any:
    """The model with an inf in the gradient of one parameter, in one of its backward passes."""
    calls = []

    def overflow(grad: Tensor) -> Tensor:
        calls.append(None)
        return grad * math.inf if len(calls) == at else grad

    model.lm_head.weight.register_hook(overflow)
    return model


@kinds
def test_an_overflow_is_a_skipped_step_that_names_the_parameter(kind: str, tmp_path: Path) -> None:
    notes = Notes()
    run = in_fp16(kind, with_inf(llama().half(), at=2), tmp_path, callbacks=[notes])
    notes.scaler = run.accelerator.scaler
    monitor = Monitor(notes.scaler, model=run.model)
    run.train()
    assert notes.rates == pytest.approx([0.75, 0.75, 0.5, 0.25])
    same = [torch.equal(*pair) for pair in zip(notes.weights, notes.weights[1:], strict=False)]
    assert same == [True, False, False]
    assert notes.reports[0] == []
    (found,) = notes.reports[1]
    assert found.startswith("lm_head.weight [12, 32]: ")
    assert notes.scaler.get_scale() == INIT_SCALE / 2
    assert "4, 1 skipped (25 %)" in monitor.report()


@kinds
def test_a_resumed_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = in_fp16(kind, with_inf(llama().half(), at=2), tmp_path, **saving)
    first.train()
    resumed = in_fp16(kind, llama().half(), tmp_path, init_scale=1.0)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    states = [each.accelerator.scaler.state_dict() for each in (first, resumed)]
    assert states[0] == states[1]
    assert states[0]["scale"] == INIT_SCALE / 2
    assert torch.equal(unrounded(first), unrounded(resumed))
    assert resumed.state.global_step == STEPS


# What a user forgets.


def test_the_bf16_that_trl_asks_for_by_default_is_refused_with_the_argument(tmp_path: Path) -> None:
    model = llama().half()
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    trainer = make("SFT", model, optimizer, tmp_path, bf16=None)
    with pytest.raises(ValueError, match=r"mixed_precision is 'bf16'.*TRL.*bf16=False"):
        attach_scaler(trainer.accelerator, GradScaler("cpu"))
