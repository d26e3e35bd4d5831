"""FLOW: sequences that the pretrained model finds easy weigh more."""

from __future__ import annotations

import torch

from finch.objectives.base import Batch, Objective, median, positive_number, require_key, sequence_means, upcast


class FLOW(Objective):
    """Weighs each sequence by exp(-f_s(theta0) / tau), the same in every epoch.

    Sanyal et al., "Upweighting Easy Samples in Fine-Tuning Mitigates Forgetting" (ICML 2025, arXiv 2502.02797). f_s(theta0) is
    the sequence's mean loss under the pretrained model, so that the median sequence weighs 1/e. The denominator stays the
    number of target tokens. A sequence without a finite f_s weighs 0.

    Args:
        tau: in nats; the median of f_s(theta0) over the training set. None: ``prepare`` sets it before the first step.

    Raises:
        ValueError: tau is not a finite number above 0.
    """

    needs = frozenset({"pretrained_token_loss"})
    is_elementwise = True

    def __init__(self, tau: float | None = None) -> None:
        self.tau = tau

    @property
    def tau(self) -> float | None:
        """In nats; None until it is known. Setting it accepts a number or a tensor of one and checks it."""
        return self._tau

    @tau.setter
    def tau(self, tau: float | torch.Tensor | None) -> None:
        meaning = "the pretrained model's median sequence loss over the training set, in nats"
        self._tau = None if tau is None else positive_number("tau", tau, meaning)

    def prepare(self, token_losses: torch.Tensor, sequence_losses: torch.Tensor) -> str:
        """Sets tau, unless it was given, to the median of ``sequence_losses``, [sequences with targets] in nats.

        Raises:
            ValueError: that median is not a finite number above 0.
        """
        if self.tau is None:
            self.tau = median(sequence_losses)
        return f"FLOW: tau {self.tau:.4f} nats"

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] in [0, 1], one value a sequence; ``token_loss`` gives shape and dtype alone.

        Raises:
            ValueError: tau is not set, or the batch lacks ``pretrained_token_loss``.
        """
        if self.tau is None:
            raise ValueError(
                "tau=None: set it to the pretrained model's median sequence loss over the training set before the first step"
            )
        means, _, ids = sequence_means(upcast(require_key(batch, "pretrained_token_loss", self)), batch)
        factors = torch.exp(-means / self.tau)
        return factors.nan_to_num(nan=0.0)[ids].to(upcast(token_loss).dtype)
