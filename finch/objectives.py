"""What each token's loss weighs in the objective.

An objective is two small functions on per-token losses:

    weights(token_loss, batch)  [batch, seq] -> [batch, seq]   detached factors of the token losses
    count(batch)                -> []                          this batch's share of the objective's denominator

``token_loss`` is fp32 cross-entropy in nats, detached; ``batch["labels"]`` is aligned with it (already shifted), -100
where ignored. The training loop sums ``weights * token_loss`` over micro-batches and ranks and divides by the sum of
``count``. This file knows nothing of torchtune, of YAML or of ranks.
"""

from __future__ import annotations

import torch

IGNORE_INDEX = -100


class CrossEntropy:
    """Plain supervised fine-tuning: every target token weighs 1, the denominator is their number."""

    def weights(self, token_loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.ones_like(token_loss)

    def count(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != IGNORE_INDEX).sum()
