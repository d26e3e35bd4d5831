"""The KL penalty of a run: its block of the config, the pretrained model it needs, its term of the loss and its line in the metrics."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from finch.config.instantiate import build, component_of
from finch.data.loader import Batch
from finch.distributed.parallel import Parallel
from finch.dtensor import to_local
from finch.errors import UserError
from finch.log import logger
from finch.models.lora import adapter_layers
from finch.objectives.kl import KL
from finch.training.chunked_loss import TokenLoss


def build_kl(cfg: DictConfig) -> KL | None:
    """The settings under ``kl_penalty``; None without the block.

    Raises:
        UserError: an argument is out of its range, or the component is another one.
    """
    if cfg.kl_penalty is None:
        return None
    settings = build(cfg.kl_penalty, "kl_penalty")
    if not isinstance(settings, KL):
        raise UserError(
            f"kl_penalty._component_={component_of(cfg.kl_penalty)} is not finch.regularization.KL; set it to that, or kl_penalty to null"
        )
    return settings


class KLPenalty:
    """strength * mean of the token KL over a step's target tokens; does nothing without the config's block.

    The mean is over all target tokens, also with an objective that has another denominator (STM).

    Args:
        cfg: a recipe's config.
        decoder: as built, on any device.
        parallel: the ranks that share a step.

    Attributes:
        has_reference: whether a frozen copy of the pretrained model is needed. With LoRA the decoder without its adapters is that
            model.
        needs_pretrained: whether the pretrained weights must be loaded, also in a run that is resumed.

    Raises:
        UserError: a setting is out of its range.
    """

    def __init__(self, cfg: DictConfig, decoder: TransformerDecoder, parallel: Parallel) -> None:
        self._settings, self._parallel = build_kl(cfg), parallel
        self.has_reference = self._settings is not None and self._settings.is_online and not adapter_layers(decoder)
        self.needs_pretrained = self._settings is not None
        self._targets = self._sum = torch.zeros((), dtype=torch.float64)

    def log_reference(self, model: TokenLoss) -> None:
        """Logs where the pretrained model's distributions come from, and what they cost on this rank."""
        if self._settings is None:
            return
        start = f"KL penalty {self._settings.strength:g} x the mean token KL from the pretrained model:"
        if model.reference is None:
            logger.info(f"{start} the model without its adapters, a second forward pass and no further weights")
            return
        weights = list(model.reference.parameters())
        size = sum(to_local(weight).numel() * weight.element_size() for weight in weights)
        logger.info(f"{start} a second forward pass, and {size / 1e6:,.1f} MB of frozen weights on each rank")

    def model_options(self) -> dict[str, Any]:
        """The arguments with which the model returns the token KL; none where no gradient is computed."""
        return {"has_kl": True} if self._settings is not None and torch.is_grad_enabled() else {}

    def start_step(self, targets: torch.Tensor) -> None:
        """``targets``: [], the number of target tokens of the step, over all ranks and micro-batches."""
        self._targets, self._sum = targets.clamp(min=1), torch.zeros_like(targets)

    def term(self, batch: Batch) -> torch.Tensor | float:
        """[] a micro-batch's share of the penalty with its graph, scaled for FSDP2's mean over ranks; from ``batch["kl"]``."""
        if self._settings is None:
            return 0.0
        kl = batch.pop("kl")
        self._sum += kl.detach().sum(dtype=torch.float64)
        if self._settings.strength == 0:
            return 0.0
        return kl.sum() * (self._settings.strength * self._parallel.data_parallel_size / self._targets)

    def metrics(self) -> dict[str, torch.Tensor]:
        """``kl``: [] the step's mean token KL in nats, over all ranks; a collective."""
        if self._settings is None:
            return {}
        return {"kl": self._parallel.all_reduce_sum_(self._sum) / self._targets}
