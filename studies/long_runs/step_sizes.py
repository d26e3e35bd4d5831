"""A hook that measures each step: the norm of its update, and the KL divergence between the models before and after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer
from studies.smollm2_tofu.data import read


class StepSizes(Hook):
    """``update_norm``: L2 norm of the change of all weights. ``step_kl``: mean KL(before || after) at the tokens of stories, in nats per token.

    Args:
        stories: JSON Lines with a text each; the first ``rows`` of them.
        max_tokens: of each story.
    """

    def __init__(self, stories: str, rows: int = 16, max_tokens: int = 128) -> None:
        self._texts = [row["text"] for row in read(stories, Path(), rows)]
        self._max_tokens = max_tokens

    def start(self, trainer: Trainer) -> None:
        self._model = trainer.decoder
        device = next(self._model.parameters()).device
        tokens = [trainer.tokenizer.encode(text)[: self._max_tokens] for text in self._texts]
        shortest = min(map(len, tokens))
        self._tokens = torch.tensor([row[:shortest] for row in tokens], device=device)
        self._last = self._log_probabilities()

    def before_step(self, state: TrainState) -> None:
        self._before = [weight.detach().clone() for weight in self._model.parameters()]

    def after_step(self, state: TrainState) -> Mapping[str, Any]:
        last, self._last = self._last, self._log_probabilities()
        kl = F.kl_div(self._last, last, reduction="none", log_target=True).sum(-1).mean()
        with torch.no_grad():
            changes = [after - before for before, after in zip(self._before, self._model.parameters(), strict=True)]
        return {"update_norm": torch.nn.utils.get_total_norm(changes).item(), "step_kl": kl.item()}

    @torch.no_grad()
    def _log_probabilities(self) -> Tensor:
        """[stories, tokens, vocabulary]"""
        logits = self._model(self._tokens)
        if isinstance(logits, list):  # in chunks, as the loss takes them
            logits = torch.cat(logits, dim=1)
        return F.log_softmax(logits.double(), dim=-1)
