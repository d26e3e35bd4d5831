"""Gemma 2's output layer: logits with a soft cap."""

from __future__ import annotations

import torch
from torch import nn
from torchtune.modules import TiedLinear


class SoftCappedTiedLinear(TiedLinear):
    """torchtune's tied output layer with Gemma 2's soft cap: ``cap * tanh(logits / cap)``.

    Args:
        tied_module: the embedding whose weight it uses.
        cap: bound of the logits' absolute value, in nats.
    """

    def __init__(self, tied_module: nn.Module, cap: float) -> None:
        super().__init__(tied_module)
        self.cap = cap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [..., embed_dim]; returns logits [..., vocab]."""
        return torch.tanh(super().__call__(x) / self.cap) * self.cap
