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
from finch.training.one_pass_loss import Weighting
from finch.training.reference_loss import ReferenceLosses
from finch.training.step_median import StepMedian

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


def token_losses(model: TokenLoss, batch: Batch) -> torch.Tensor:
    """The forward pass alone: [batch, seq] in nats."""
    losses: torch.Tensor = model(**model_inputs(batch))
    return losses


def micro_batch_loss(
    model: TokenLoss,
    batch: Batch,
    objective: Objective,
    median: StepMedian,
    kl_penalty: KLPenalty,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of a training step.

    Args:
        median: of the step; gets this micro-batch's losses.
        kl_penalty: gets this micro-batch's divergence.
        scale: [] what the weighted sum of the token losses is multiplied by.

    Returns:
        [batch, seq] token losses in nats, detached; and [] the micro-batch's share of what is differentiated, with its graph.
    """
    is_known = median.add_to(batch)

    def weights(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if not is_known:  # this forward pass decides it
            median.observe(outputs["loss"], batch)
        return objective.weights(outputs["loss"], {**batch, **outputs})

    weighting = Weighting(weights, objective.is_elementwise and is_known, scale, kl_penalty.scale)
    options = kl_penalty.model_options()
    if "top_logits" in objective.needs:
        options["num_top_logits"] = EAFT.num_logits
    outputs = model(**model_inputs(batch), **options, weighting=weighting)
    if is_known:
        median.observe(outputs["loss"], batch)
    kl_penalty.observe(outputs)
    return outputs["loss"], outputs["total"]
