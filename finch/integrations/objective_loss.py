"""finch's objectives as ``compute_loss_func`` of transformers' Trainer and TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any

import torch

from finch.errors import UserError
from finch.integrations.causal_lm import shift, token_losses
from finch.integrations.step_loss import StepLoss
from finch.objectives import IGNORE_INDEX, Objective


class ObjectiveLoss:
    """A reweighted loss for the Trainer, sum(weights * token losses) / target tokens of the complete step.

        loss = ObjectiveLoss(DFT())
        Trainer(..., compute_loss_func=loss, callbacks=[FinchCallback(..., compute_loss_func=loss)])

    The callback then takes the unweighted losses from here. Evaluation reports the unweighted loss.

    The Trainer passes one micro-batch's logits and labels, so this serves the objectives that need no more: CrossEntropy, DFT, EAFT, and
    TALR with a number for tau. FLOW and STM need the pretrained model's losses, TALR's other forms the median over the step's batch:
    finch's recipes have both.

    Args:
        objective: from ``finch.objectives``.

    Attributes:
        step_loss: takes the unweighted losses of training; set by ``FinchCallback``.

    Raises:
        UserError: the objective needs what the Trainer does not pass.
    """

    def __init__(self, objective: Objective) -> None:
        name = type(objective).__name__
        if missing := objective.needs - {"top_logits"}:
            raise UserError(
                f"objective={name}: it needs {', '.join(sorted(missing))}, which compute_loss_func does not get; use finch's recipe"
            )
        if objective.statistic is not None:
            raise UserError(
                f"objective={name}: its statistic={objective.statistic} is a median over the step's batch, and compute_loss_func sees one "
                "micro-batch; pass a number of nats, as TALR(tau=1.5), or use finch's recipe"
            )
        self.objective = objective
        self.step_loss: StepLoss | None = None

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The loss of a micro-batch.

        Args:
            outputs: of the model, with ``logits``, [batch, seq, vocab].
            labels: [batch, seq] int64, not shifted, -100 where ignored.
            num_items_in_batch: [] target tokens of the step; None divides by the micro-batch's own, as in evaluation.

        Returns:
            [] fp32, graph attached.
        """
        targets = shift(labels)
        losses = token_losses(outputs.logits, targets)
        num_targets = (targets != IGNORE_INDEX).sum()
        denominator = num_targets.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if not torch.is_grad_enabled():
            return losses.sum() / denominator
        if self.step_loss is not None:
            self.step_loss.update(losses.detach().double().sum(), num_targets)
        batch = {"labels": targets}
        if "top_logits" in self.objective.needs:
            logits = outputs.logits[:, -targets.shape[1] :].detach()
            batch["top_logits"] = logits.topk(min(20, logits.shape[-1]), dim=-1).values
        return (self.objective.weights(losses.detach(), batch) * losses).sum() / denominator
