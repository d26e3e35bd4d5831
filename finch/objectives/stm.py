"""STM: only tokens that the pretrained model finds easy are learned."""

from __future__ import annotations

import math

import torch

from finch.objectives.base import IGNORE_INDEX, Batch, Objective, require_key, upcast


class STM(Objective):
    """Keeps the target tokens with perplexity exp(l(theta0)) <= threshold and masks the others.

    Selective token masking, Wu et al., "Clear Minds Think Alike: What Makes LLM Fine-tuning Robust? A Study of Token Perplexity"
    (2025, arXiv 2501.14315). Masked tokens stay in the context. The denominator counts the tokens kept.

    Args:
        threshold: a perplexity, above 1; 2.5 in the paper, which masks 20 to 24% of its tokens.

    Raises:
        ValueError: threshold is not above 1.
    """

    needs = frozenset({"pretrained_token_loss"})
    is_elementwise = True

    def __init__(self, threshold: float = 2.5) -> None:
        if not (isinstance(threshold, (int, float)) and threshold > 1):
            raise ValueError(
                f"threshold={threshold!r} must be above 1: it is a perplexity, and at 1 or below no token is kept; 2.5 in the paper"
            )
        self.threshold = float(threshold)

    def prepare(self, token_losses: torch.Tensor, sequence_losses: torch.Tensor) -> str:
        """Counts how many of ``token_losses``, [target tokens] in nats, are kept.

        Raises:
            ValueError: none is.
        """
        num_kept, number = int((upcast(token_losses) <= math.log(self.threshold)).sum()), token_losses.numel()
        if num_kept == 0:
            raise ValueError(
                f"STM with threshold={self.threshold:g} keeps 0 of {number} target tokens, since each has a perplexity above it under the "
                "pretrained model; raise threshold"
            )
        return f"STM: keeps {num_kept:,} of {number:,} target tokens ({num_kept / number:.1%})"

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] 1 where the token is kept, else 0; ``token_loss`` gives shape and dtype alone.

        Raises:
            ValueError: the batch lacks ``pretrained_token_loss``.
        """
        return self._is_kept(batch).to(upcast(token_loss).dtype)

    def count(self, batch: Batch) -> torch.Tensor:
        """[] int64, the number of tokens kept."""
        return self._is_kept(batch).sum()

    def _is_kept(self, batch: Batch) -> torch.Tensor:
        pretrained = upcast(require_key(batch, "pretrained_token_loss", self))
        # In nats, so that a CPU that counts and a GPU that weighs cannot differ by a rounding of exp.
        return (pretrained <= math.log(self.threshold)) & (batch["labels"] != IGNORE_INDEX)
