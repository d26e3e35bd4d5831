"""FINCH for Lightning's Trainer, as a callback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.integrations.step_loss import MeanLoss, check_settings
from finch.optim.finch_lr import FinchLR

require_extras("finch.integrations.lightning", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging


def count_targets(batch: Any) -> torch.Tensor:
    """[] labels of ``batch["labels"]``, [batch, seq], that a causal language model predicts: all but -100 and a row's first.

    Raises UserError for a batch without such labels, as a tuple.
    """
    try:
        return (batch["labels"][:, 1:] != -100).sum()
    except (AttributeError, IndexError, KeyError, TypeError):
        raise UserError(
            f"count_targets: a batch, {type(batch).__name__}, has no labels [batch, seq] under the key labels; pass "
            "FinchCallback(count_targets=...), a function of the batch that returns its number of target tokens"
        ) from None


class FinchCallback(Callback):
    """Sets the learning rate of each optimizer step from the losses that ``training_step`` has returned for it.

    ``training_step`` must return the mean cross-entropy over the target tokens of its batch, unweighted. The state is in Lightning's
    checkpoints; ``lr`` and ``ema_loss`` are logged.

    ``init``: in nats, or ``"first_batch"``; ``count_targets``: the number of target tokens of a batch; ``options``: those of
    :class:`finch.FinchLR`, as ``eta_max``; ``total_steps`` is the Trainer's. ``fit`` raises UserError without a single automatic
    optimizer, and for another schedule, StochasticWeightAveraging, a strategy that accumulates gradients by itself (DeepSpeed), fp16, or
    a checkpoint without FINCH's state.
    """

    def __init__(
        self, *, init: float | str = "first_batch", count_targets: Callable[[Any], Any] = count_targets, **options: Any
    ) -> None:
        self._options, self._count_targets = {"init": init, **options}, count_targets
        check_settings(**self._options)
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._resumed = None  # of a checkpoint that validate or test have loaded; fit's comes after this

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module, self._resumed)
        self._step_loss = MeanLoss()
        self.schedule = FinchLR(trainer.optimizers[0], **{"total_steps": _total_steps(trainer), **self._options})
        if self._resumed is not None:
            self.schedule.load_state_dict(self._resumed)
            self._resumed = None  # another run with this callback starts anew

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._num_targets = self._count_targets(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        mean = loss.detach().double() * trainer.accumulate_grad_batches  # Lightning has divided by it
        self._step_loss.update(mean * self._num_targets, self._num_targets)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._step_loss.is_empty and trainer.world_size == 1:
            return  # `training_step` has returned None, which Lightning allows on one device; there is no gradient
        if not self.schedule.step(*self._step_loss.compute()):
            optimizer.zero_grad(set_to_none=True)  # a parameter without gradient is not updated
        metrics = self.schedule.metrics()
        pl_module.log_dict({"lr": metrics["lr"], "ema_loss": metrics["ema_loss"]})

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict() if hasattr(self, "schedule") else {}  # a checkpoint before the first step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict or None


def _total_steps(trainer: Trainer) -> float:
    """Optimizer steps of the complete run, at the most; inf or -1: unknown."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    factors = next((each for each in callbacks if isinstance(each, GradientAccumulationScheduler)), None)
    batches, epochs, limit = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    if factors is None or epochs in (None, -1) or math.isinf(batches):
        return trainer.estimated_stepping_batches  # by the first epoch's factor
    steps = sum(math.ceil(batches / factors.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
    return steps if limit == -1 else min(steps, limit)


def _check(trainer: Trainer, pl_module: LightningModule, resumed: Any) -> None:
    if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
        raise UserError(
            "optimizer: FINCH's callback needs one optimizer and automatic optimization; else step finch.FinchLR yourself"
        )
    if trainer.lr_scheduler_configs:
        raise UserError(
            "lr_scheduler: FINCH is the only one to set the learning rate; return only the optimizer from configure_optimizers"
        )
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise UserError(
            "StochasticWeightAveraging: it sets learning rates of its own, which FINCH overwrites; leave that callback out"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"strategy={type(trainer.strategy).__name__}: it accumulates gradients and updates the weights by itself, so that FINCH does not know its "
            "steps; use strategy='ddp'"
        )
    if trainer.precision == "16-mixed":
        raise UserError(
            "precision=16-mixed: it scales the loss that FINCH sees; use bf16-mixed, or step finch.FinchLR yourself"
        )
    if trainer.ckpt_path is not None and resumed is None:
        raise UserError(
            f"ckpt_path={trainer.ckpt_path}: the checkpoint has no state of FinchCallback; resume from one that it saved"
        )
