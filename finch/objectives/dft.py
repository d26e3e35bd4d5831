"""DFT: tokens that the model finds likely weigh more."""

from __future__ import annotations

import torch

from finch.objectives.base import Batch, Objective, upcast


class DFT(Objective):
    """Weighs each token by its probability p = exp(-l) under the model in training, detached.

    Wu et al., "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification" (2025, arXiv
    2508.05629). Without the detaching, the gradient of p * l would push tokens with p < 1/e further down. The denominator is the
    number of target tokens of the complete step; the authors' code takes the mean of each micro-batch instead.
    """

    is_elementwise = True

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] in [0, 1]."""
        return torch.exp(-upcast(token_loss))
