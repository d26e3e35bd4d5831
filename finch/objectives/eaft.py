"""EAFT: tokens that the model is unsure about weigh more."""

from __future__ import annotations

import torch

from finch.objectives.base import Batch, Objective, require_key, upcast


class EAFT(Objective):
    """Weighs each token by the entropy of its 20 most likely tokens over 3.0, detached.

    "Entropy-Adaptive Fine-Tuning" (arXiv 2601.02151). Probabilities are renormalized among the 20. 3.0 is the paper's and the
    public code's rounding of ln 20 = 2.996, the largest entropy. The denominator is the number of target tokens.
    """

    max_entropy = 3.0

    needs = frozenset({"top_logits"})
    num_logits = 20
    is_elementwise = True

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] in [0, 1]; ``token_loss`` gives the dtype alone.

        Raises:
            ValueError: the batch lacks ``top_logits``, or its last dimension is not 20.
        """
        logits = upcast(require_key(batch, "top_logits", self))
        if logits.shape[-1] != self.num_logits:
            raise ValueError(
                f"batch['top_logits'] of shape {list(logits.shape)} must hold the {self.num_logits} largest logits of each token; "
                "a vocabulary smaller than that cannot be trained with EAFT"
            )
        entropy: torch.Tensor = torch.special.entr(logits.softmax(-1)).sum(
            -1
        )  # entr(0) = 0, where p * log(p) would be NaN
        return (entropy / self.max_entropy).to(upcast(token_loss).dtype)
