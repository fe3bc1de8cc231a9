"""Lightning with FP16Plugin, under both names of its package, and with FP16_Optimizer by hand."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.cpu_only
MAX_NORM = 0.6  # Of a run's norms some are smaller, some larger.


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    """The package, with `FP16Plugin` of the module of apex_mp that has its name."""
    package = importlib.import_module(request.param)
    package.FP16Plugin = importlib.import_module(f"apex_mp.{request.param}").FP16Plugin
    return package


def learner(pl: Any, make_optimizer: Any, **methods: Any) -> Any:
    """A LightningModule of the task that notes its losses and rates; `methods` replace its own."""

    def __init__(self: Any) -> None:  # noqa: N807
        pl.LightningModule.__init__(self)
        self.net, self.losses, self.rates = tasks.model(), [], []

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = tasks.loss_of(self.net, batch) * self.factor_of(index)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self: Any) -> Any:
        return make_optimizer(self.parameters())

    own = {
        "__init__": __init__,
        "training_step": training_step,
        "configure_optimizers": configure_optimizers,
        "factor_of": lambda self, index: 1.0,
    }
    return type("Learner", (pl.LightningModule,), own | methods)()


def trainer(pl: Any, plugin: Any = None, **options: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    plugins = [] if plugin is None else [plugin]
    options = {**dict.fromkeys(quiet, False), "max_epochs": 1, "plugins": plugins, **options}
    return pl.Trainer(accelerator="cpu", **options)


def data(steps: int = tasks.STEPS) -> Any:
    return torch.utils.data.DataLoader(tasks.batches(steps), batch_size=None)


def fit(pl: Any, module: Any, plugin: Any, steps: int = tasks.STEPS, **options: Any) -> Any:
    fitted = trainer(pl, plugin, **options)
    fitted.fit(module, data(steps))
    return fitted


# Training


@pytest.mark.parametrize(("precision", "half"), [("16-mixed", False), ("16-true", True)])
def test_a_model_learns_as_in_fp32(pl: Any, precision: str, half: bool) -> None:
    module = learner(pl, lambda params: FusedAdam(params, tasks.LR, master_weights=half))
    plugin = pl.FP16Plugin(precision, "cpu")
    fit(pl, module, plugin, gradient_clip_val=10.0, accumulate_grad_batches=2)
    tasks.assert_same_course(module.losses, tasks.fp32_losses(accumulation=2))
    assert module.net[0].weight.dtype == (torch.float16 if half else torch.float32)


@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedSGD, torch.optim.AdamW])
def test_gradient_clip_val_ends_with_the_weights_of_a_torch_loop(
    pl: Any, optimizer_class: Any
) -> None:
    norms = []

    def configure_gradient_clipping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Unscaled, as Lightning's documentation says of this hook.
        norms.append(torch.nn.utils.get_total_norm(tasks.grads_of(self)).item())
        self.clip_gradients(optimizer, *args, **kwargs)

    module = learner(
        pl,
        lambda params: optimizer_class(params, tasks.LR),
        configure_gradient_clipping=configure_gradient_clipping,
    )
    fit(pl, module, pl.FP16Plugin(device="cpu"), gradient_clip_val=MAX_NORM)
    assert min(norms) < MAX_NORM < max(norms)
    expected = tasks.torch_amp_weights(optimizer_class, MAX_NORM)
    torch.testing.assert_close([*module.parameters()], expected, rtol=0, atol=0)


def test_clipping_by_value_is_that_of_unscaled_gradients(pl: Any) -> None:
    seen = []

    class Noting(FusedAdam):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            grads = [param.grad for group in self.param_groups for param in group["params"]]
            seen.append(max(grad.abs().max().item() for grad in grads))
            return super().step(*args, **kwargs)

    for precision, half in (("16-mixed", False), ("16-true", True)):
        module = learner(pl, lambda params, half=half: Noting(params, master_weights=half))
        plugin = pl.FP16Plugin(precision, "cpu")
        clipping = {"gradient_clip_val": 0.0625, "gradient_clip_algorithm": "value"}
        fit(pl, module, plugin, steps=2, **clipping)
    assert seen == [0.0625] * 4


# Skipped steps


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_an_overflow_is_a_skipped_step_and_a_schedule_can_stand_still(
    pl: Any, precision: str, clip: float | None
) -> None:
    def configure_optimizers(self: Any) -> Any:
        half = self.trainer.precision == "16-true"
        optimizer = FusedAdam(self.parameters(), tasks.LR, master_weights=half)
        schedule = {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        if not self.trainer.precision_plugin.scaler.step_was_skipped(scheduler.optimizer):
            scheduler.step()

    weights = []

    def on_train_batch_end(self: Any, *args: Any) -> None:
        weights.append(self.net[0].weight.detach().clone())

    module = learner(
        pl,
        None,
        configure_optimizers=configure_optimizers,
        lr_scheduler_step=lr_scheduler_step,
        on_train_batch_end=on_train_batch_end,
        factor_of=lambda self, index: math.inf if index == 1 else 1.0,
    )
    fitted = fit(pl, module, pl.FP16Plugin(precision, "cpu"), steps=4, gradient_clip_val=clip)
    assert [rate / tasks.LR for rate in module.rates] == [1.0, 0.5, 0.5, 0.25]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert fitted.precision_plugin.scaler.get_scale() == 2.0**15
    # Lightning counts what it has tried, as with its own plugin.
    assert fitted.global_step == 4


# Checkpoints


def test_a_resumed_run_goes_on_to_the_bit(pl: Any, tmp_path: Path) -> None:
    def run(plugin: Any, path: Path | None, epochs: int) -> tuple[Any, Any]:
        module = learner(
            pl,
            lambda params: FusedAdam(params, tasks.LR),
            # Epoch 0 has an overflow.
            factor_of=lambda self, index: (
                math.inf if (self.current_epoch, index) == (0, 3) else 1.0
            ),
        )
        fitted = trainer(pl, plugin, max_epochs=epochs, gradient_clip_val=MAX_NORM)
        fitted.fit(module, data(8), ckpt_path=path)
        return module, fitted

    _, first = run(pl.FP16Plugin(device="cpu"), None, 1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, second = run(pl.FP16Plugin(device="cpu"), tmp_path / "first.ckpt", 2)
    whole, at_once = run(pl.FP16Plugin(device="cpu"), None, 2)
    states = [each.precision_plugin.scaler.state_dict() for each in (second, at_once)]
    assert states[0] == states[1]
    assert (states[0]["scale"], states[0]["_growth_tracker"]) == (2.0**15, 12)
    torch.testing.assert_close([*resumed.parameters()], [*whole.parameters()], rtol=0, atol=0)


# By hand


def by_hand(self: Any, batch: Any, index: int) -> None:
    optimizer = self.optimizers()
    loss = tasks.loss_of(self.net, batch) * self.factor_of(index)
    self.losses.append(loss.item())
    optimizer.zero_grad()
    self.backward_of(optimizer, loss)
    self.clip(optimizer)
    optimizer.step()


def manual(pl: Any, make_optimizer: Any, **methods: Any) -> Any:
    own = {"training_step": by_hand, "clip": lambda self, optimizer: None}
    module = learner(pl, make_optimizer, **own | methods)
    module.automatic_optimization = False
    return module


def fp16_optimizer(params: Any) -> FP16_Optimizer:
    args = {"init_scale": 2.0**16}
    inner = FusedAdam(params, tasks.LR)
    return FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False)


def test_manual_optimization_with_fp16_optimizer_learns_as_in_fp32(pl: Any) -> None:
    backward = {"backward_of": lambda self, optimizer, loss: optimizer.backward(loss)}
    module = manual(pl, fp16_optimizer, **backward)
    module.net.half()
    fitted = fit(pl, module, None)
    tasks.assert_same_course(module.losses, tasks.fp32_losses())
    assert fitted.global_step == tasks.STEPS


def test_manual_optimization_with_fp16_optimizer_skips_and_resumes(pl: Any, tmp_path: Path) -> None:
    overflow = {"factor_of": lambda self, index: math.inf if index == 1 else 1.0}
    backward = {"backward_of": lambda self, optimizer, loss: optimizer.backward(loss)}
    module = manual(pl, fp16_optimizer, **backward, **overflow)
    module.net.half()
    fitted = fit(pl, module, None, steps=2)
    assert fitted.optimizers[0].overflow
    fitted.save_checkpoint(tmp_path / "by_hand.ckpt")
    resumed = trainer(pl, max_epochs=2)
    other = manual(pl, fp16_optimizer, **backward)
    other.net.half()
    resumed.fit(other, data(2), ckpt_path=tmp_path / "by_hand.ckpt")
    assert resumed.optimizers[0].loss_scale == 2.0**15
    (master,) = {p.dtype for g in resumed.optimizers[0].param_groups for p in g["params"]}
    assert master == torch.float32


# What is refused


def test_fp16_optimizer_in_automatic_optimization_warns_that_the_loss_was_not_scaled(
    pl: Any,
) -> None:
    module = learner(pl, fp16_optimizer)
    module.net.half()
    with pytest.warns(RuntimeWarning, match=r"do not come from optimizer\.backward\(loss\)"):
        fit(pl, module, None, steps=1)
