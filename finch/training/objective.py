"""The objective a config names, the pretrained model's losses it needs before the first step, and what it needs of each forward pass."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from finch.config.instantiate import build
from finch.data.dataset import Samples
from finch.data.loader import Batch, model_inputs
from finch.errors import UserError
from finch.log import logger
from finch.objectives import EAFT, CrossEntropy, Objective
from finch.training.chunked_loss import TokenLoss
from finch.training.config_checks import is_objective
from finch.training.kl_penalty import KLPenalty
from finch.training.reference_loss import ReferenceLosses

NUM_CHUNKS = 8
"""In how many chunks an objective's logits are computed; torchtune's default for its chunked cross-entropy."""


def build_objective(cfg: DictConfig) -> tuple[Objective, int]:
    """The objective, and in how many chunks its logits are computed. Every cross-entropy of torchtune's is ``CrossEntropy``."""
    loss = build(cfg.loss, "loss")
    if is_objective(cfg):
        return loss, NUM_CHUNKS
    num_chunks = getattr(loss, "num_output_chunks", 1)
    # The KL penalty needs several tensors as large as the logits: they are never kept for the backward.
    return CrossEntropy(), NUM_CHUNKS if num_chunks == 1 and cfg.kl_penalty is not None else num_chunks


def prepare_objective(
    objective: Objective, reference: ReferenceLosses | None, samples: Samples, tau_mode: str | None
) -> None:
    """Gives the objective the reference losses it needs, and lets every row carry its own.

    Args:
        tau_mode: which step's median sequence loss is TALR's tau, see :class:`finch.training.step_median.StepMedian`.

    Raises:
        UserError: the objective would have nothing to learn.
    """
    if tau_mode is not None:
        which = "the step before" if tau_mode == "lagged" else "the step"
        name = type(objective).__name__
        logger.info(f"{name}: tau is the median sequence loss of {which} ({tau_mode})")
    if reference is None or "pretrained_token_loss" not in objective.needs:
        return
    samples.reference_losses = reference.row
    try:
        logger.info(objective.prepare(reference.losses, reference.sequence_losses))
    except ValueError as error:
        raise UserError(f"loss: {error}") from error


def token_losses(model: TokenLoss, batch: Batch, objective: Objective, kl_penalty: KLPenalty) -> torch.Tensor:
    """The forward pass: [batch, seq] in nats. What objective and penalty need beside is added to the batch."""
    options = kl_penalty.model_options()
    if "top_logits" in objective.needs:
        options["num_top_logits"] = EAFT.num_logits
    outputs = model(**model_inputs(batch), **options)
    if not options:
        return outputs
    losses: torch.Tensor = outputs.pop("loss")
    batch.update(outputs)
    return losses
