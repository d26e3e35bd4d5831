"""Lightning's callback in one process: its state, its refusals. test_equality has its learning rates."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.causal_lm import collate, finch_rates, make_model, make_token_rows

from finch.base.errors import UserError
from finch.integrations.lightning import FinchCallback

ROWS = make_token_rows(24)


class Module(pl.LightningModule):
    def __init__(self, schedule: Any = None) -> None:
        super().__init__()
        self.model, self.schedule, self.losses, self.rates = make_model(), schedule, [], []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # after the callbacks'
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


def fit(
    folder: Any, *callbacks: Any, module: Any = None, ckpt_path: Any = None, **changes: Any
) -> tuple[Module, pl.Trainer]:
    module = Module() if module is None else module
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": folder, **quiet, **changes}
    trainer = pl.Trainer(callbacks=list(callbacks), **options)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4, collate_fn=collate)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module, trainer


def finch(**options: Any) -> FinchCallback:
    return FinchCallback(**{"eta_max": 1e-2, "init": "first_batch", **options})


def test_accumulated_micro_batches_count_their_tokens(tmp_path):
    losses, counts = [], []

    class Noting(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(float(loss.detach()))
            counts.append(int((batch["labels"][:, 1:] != -100).sum()))
            return loss

    module, trainer = fit(tmp_path, callback := finch(), module=Noting(), accumulate_grad_batches=2)
    sums = [loss * count for loss, count in zip(losses, counts, strict=True)]
    steps = [sum(sums[i : i + 2]) / sum(counts[i : i + 2]) for i in range(0, len(sums), 2)]
    assert module.rates == pytest.approx(finch_rates(steps, 1e-3, 1e-2, None), rel=1e-6)
    assert trainer.callback_metrics["lr"] == pytest.approx(module.rates[-1])
    assert trainer.callback_metrics["ema_loss"] == pytest.approx(callback.schedule.ema_loss)


def test_decay_ends_with_the_trainers_steps(tmp_path):
    plain, decayed = fit(tmp_path, finch(ema=0.99))[0].rates, fit(tmp_path, finch(ema=0.99, decay=0.5))[0].rates
    assert decayed[:7] == plain[:7]
    assert decayed[-1] == pytest.approx(plain[-1] / 6, rel=0.05)  # at other losses
    with pytest.raises(ValueError, match=r"^decay=0\.5 needs the number of the run's steps: total_steps=inf is none"):
        fit(tmp_path, finch(decay=0.5), max_epochs=-1)


@pytest.mark.parametrize(("factors", "limit"), [({0: 1, 1: 4}, -1), ({0: 4, 1: 1}, -1), ({1: 2}, 7)])
def test_decay_ends_with_the_steps_of_scheduled_accumulation(tmp_path, factors, limit):
    accumulating = pl.callbacks.GradientAccumulationScheduler(factors)
    module, trainer = fit(tmp_path, callback := finch(decay=0.5), accumulating, max_steps=limit)
    last = finch_rates([callback.schedule.ema_loss], 1e-3, 1e-2, None)[0] / (0.5 * trainer.global_step)
    assert module.rates[-1] == pytest.approx(last, rel=1e-6)
    assert trainer.global_step == len(module.rates) == (8 if limit == -1 else limit)


def test_resumes_bit_for_bit(tmp_path):
    straight, _ = fit(tmp_path, finch())
    _, trainer = fit(tmp_path, finch(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = fit(tmp_path, finch(), ckpt_path=tmp_path / "one.ckpt")
    assert resumed.rates == straight.rates[6:]
    for one, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_callback_serves_the_next_run(tmp_path):
    _, trainer = fit(tmp_path, callback := finch(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    fit(tmp_path, callback, ckpt_path=tmp_path / "one.ckpt")
    again, _ = fit(tmp_path, callback, max_epochs=1)
    assert callback.schedule.state_dict()["num_steps"] == 6
    rates = fit(tmp_path, finch(), max_epochs=1)[0].rates
    assert again.rates == rates

    class Failing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise RuntimeError("in the middle of a step")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="in the middle"):
        fit(tmp_path, callback, module=Failing(), accumulate_grad_batches=2)
    assert fit(tmp_path, callback, max_epochs=1)[0].rates == rates


def test_checkpoint_before_the_first_step_and_a_batch_that_is_passed_over(tmp_path):
    """Lightning saves one to find the largest batch; ``training_step`` may return None."""

    class Passing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    class Saving(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "early.ckpt")

    fit(tmp_path, callback := finch(), Saving(), module=Passing(), max_epochs=1)
    assert (tmp_path / "early.ckpt").is_file()
    assert callback.schedule.state_dict()["num_steps"] == 5


def test_checkpoint_without_finch_is_refused(tmp_path):
    _, trainer = fit(tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(UserError, match=r"^ckpt_path=.*one.ckpt: the checkpoint has no state of FinchCallback"):
        fit(tmp_path, finch(), ckpt_path=tmp_path / "one.ckpt")


def test_a_checkpoint_of_another_stage_is_not_resumed(tmp_path):
    """Lightning restores the callbacks' state for validate and test too."""

    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    _, trainer = fit(tmp_path, callback := finch(), module=Validated(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4, collate_fn=collate)
    trainer.validate(Validated(), loader, ckpt_path=tmp_path / "one.ckpt", verbose=False)
    fit(tmp_path, callback, max_epochs=1)
    assert callback.schedule.last_epoch == 6


def test_batch_without_labels_names_count_targets(tmp_path):
    class Pairs(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(input_ids=batch[0], labels=batch[1]).loss

    def fit_pairs(callback: FinchCallback) -> None:
        tokens = torch.ones(4, 6, dtype=torch.long)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=2)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        pl.Trainer(callbacks=[callback], max_epochs=1, default_root_dir=tmp_path, **options).fit(Pairs(), loader)

    with pytest.raises(
        UserError, match=r"^count_targets: a batch, list, has no labels .*; pass FinchCallback\(count_t"
    ):
        fit_pairs(finch())
    fit_pairs(callback := finch(count_targets=lambda batch: batch[1][:, 1:].numel()))
    assert callback.schedule.last_epoch == 2


def test_who_sets_rates_or_accumulates_by_itself_is_refused(tmp_path):
    class Engine(pl.strategies.SingleDeviceStrategy):
        handles_gradient_accumulation = True  # as DeepSpeedStrategy says

    averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-5)
    with pytest.raises(UserError, match=r"^StochasticWeightAveraging: it sets learning rates of its own"):
        fit(tmp_path, finch(), averaging)
    with pytest.raises(UserError, match=r"^strategy=Engine: it accumulates gradients"):
        fit(tmp_path, finch(), strategy=Engine(torch.device("cpu")))


def test_mistakes_are_refused(tmp_path):
    with pytest.raises(TypeError, match="eta_mx"):
        finch(eta_mx=3)
    decaying, manual = Module(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)), Module()
    manual.automatic_optimization = False
    with pytest.raises(UserError, match=r"^lr_scheduler: FINCH is the only one to set the learning rate"):
        fit(tmp_path, finch(), module=decaying)
    with pytest.raises(UserError, match=r"^optimizer: FINCH's callback needs one optimizer and automatic"):
        fit(tmp_path, finch(), module=manual)
