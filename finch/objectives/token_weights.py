"""The objectives that weigh each token or sequence: DFT and TALR by the model's probability, EAFT by its entropy, FLOW and STM by the
pretrained model's loss."""

from __future__ import annotations

import math

import torch

from finch.objectives.base import (
    IGNORE_INDEX,
    Batch,
    Objective,
    median,
    positive_number,
    require_key,
    sequence_means,
    upcast,
)


class FLOW(Objective):
    """Weighs each sequence by exp(-f_s(theta0) / tau), the same in every epoch.

    Sanyal et al., "Upweighting Easy Samples in Fine-Tuning Mitigates Forgetting" (ICML 2025, arXiv 2502.02797). f_s(theta0) is
    the sequence's mean loss under the pretrained model, so that the median sequence weighs 1/e. The denominator stays the
    number of target tokens. A sequence without a finite f_s weighs 0.

    ``tau`` in nats is the median of f_s(theta0) over the training set, which ``prepare`` sets; one that is given must be a finite number above
    0 (ValueError).
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
        """Sets tau, unless it was given, to the median of ``sequence_losses``, [sequences with targets] in nats. Raises ValueError if that
        median is not a finite number above 0."""
        if self.tau is None:
            self.tau = median(sequence_losses)
        return f"FLOW: tau {self.tau:.4f} nats"

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] in [0, 1], one value per sequence; ``token_loss`` gives only shape and dtype. Raises ValueError if tau is not set,
        or the batch lacks ``pretrained_token_loss``."""
        if self.tau is None:
            raise ValueError(
                "tau=None: set it to the pretrained model's median sequence loss over the training set before the first step"
            )
        means, _, ids = sequence_means(upcast(require_key(batch, "pretrained_token_loss", self)), batch)
        factors = torch.exp(-means / self.tau)
        return factors.nan_to_num(nan=0.0)[ids].to(upcast(token_loss).dtype)


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
        """[batch, seq] in [0, 1]; ``token_loss`` gives only the dtype. Raises ValueError if the batch lacks ``top_logits``, or its last
        dimension is not 20."""
        logits = upcast(require_key(batch, "top_logits", self))
        if logits.shape[-1] != self.num_logits:
            raise ValueError(
                f"batch['top_logits'] of shape {list(logits.shape)} must hold the {self.num_logits} largest logits of each token; "
                "a vocabulary smaller than that cannot be trained with EAFT"
            )
        # entr(0) = 0, where p * log(p) would be NaN.
        entropy: torch.Tensor = torch.special.entr(logits.softmax(-1)).sum(-1)
        return (entropy / self.max_entropy).to(upcast(token_loss).dtype)


class STM(Objective):
    """Keeps the target tokens with perplexity exp(l(theta0)) <= threshold and masks the others.

    Selective token masking, Wu et al., "Clear Minds Think Alike: What Makes LLM Fine-tuning Robust? A Study of Token Perplexity"
    (2025, arXiv 2501.14315). Masked tokens stay in the context. The denominator counts the tokens kept.

    ``threshold``: a perplexity above 1 (else ValueError); 2.5 in the paper, which masks 20 to 24% of its tokens.
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
        """Counts how many of ``token_losses``, [target tokens] in nats, are kept. Raises ValueError if none is."""
        num_kept, number = int((upcast(token_losses) <= math.log(self.threshold)).sum()), token_losses.numel()
        if num_kept == 0:
            raise ValueError(
                f"STM with threshold={self.threshold:g} keeps 0 of {number} target tokens, since each has a perplexity above it under the "
                "pretrained model; raise threshold"
            )
        return f"STM: keeps {num_kept:,} of {number:,} target tokens ({num_kept / number:.1%})"

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] 1 where the token is kept, else 0; ``token_loss`` gives only shape and dtype. Raises ValueError if the batch lacks
        ``pretrained_token_loss``."""
        return self._is_kept(batch).to(upcast(token_loss).dtype)

    def count(self, batch: Batch) -> torch.Tensor:
        """[] int64, the number of tokens kept."""
        return self._is_kept(batch).sum()

    def _is_kept(self, batch: Batch) -> torch.Tensor:
        pretrained = upcast(require_key(batch, "pretrained_token_loss", self))
        # In nats, so that a CPU that counts and a GPU that weighs cannot differ by a rounding of exp.
        return (pretrained <= math.log(self.threshold)) & (batch["labels"] != IGNORE_INDEX)


class TALR(Objective):
    """Weighs each token by max(p^(1/tau), w_min), with p its probability under the model in training, detached.

    Lin et al., "SFT Doesn't Always Hurt General Capabilities: Revisiting Domain-Specific Fine-Tuning in LLMs" (2025, arXiv
    2509.20758). TALR(tau=1, w_min=0) is DFT. The denominator is the number of target tokens.

    Where tau is not finite (no sequence of the step had a target, or the model has diverged) every weight is 1, so that a loss of
    0 stays 0 and a non-finite loss shows. At tau = 0 the weights are the limit: 1 where the loss is 0, w_min elsewhere.

    Args:
        tau: in nats. ``"exact"``: the median of f_s over the sequences of this step's batch, as Lin et al. have it; it must be known
            before the first backward, so with several micro-batches each forward runs twice. ``"lagged"``: the median of the
            step before, at no extra forward. ``"auto"``: exact where a step has one micro-batch, since it costs nothing there,
            else lagged. A number: constant, as FINCH's paper writes TALR.
        w_min: the least weight, in [0, 1].

    Raises ValueError if an argument is out of range.
    """

    is_elementwise = True  # given tau

    def __init__(self, tau: str | float = "auto", w_min: float = 0.01) -> None:
        self._tau: float | None = None
        if isinstance(tau, str):
            if tau not in ("auto", "exact", "lagged"):
                raise ValueError(f"tau={tau!r} must be 'auto', 'exact', 'lagged' or a number of nats above 0")
            self.statistic = tau
        else:
            self._tau = positive_number("tau", tau, "a number of nats, or 'auto', 'exact' or 'lagged'")
        if not (isinstance(w_min, (int, float)) and 0 <= w_min <= 1):
            raise ValueError(f"w_min={w_min!r} must lie in [0, 1]: it is the least weight of a token, 0.01 by default")
        self.w_min = float(w_min)

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] in [w_min, 1]. Raises ValueError if tau is a statistic and the batch lacks ``statistic``."""
        losses = upcast(token_loss)
        if self._tau is not None:
            return torch.exp(-losses / self._tau).clamp(min=self.w_min)
        tau = torch.as_tensor(require_key(batch, "statistic", self), dtype=losses.dtype, device=losses.device)
        # At tau = 0 a loss of 0 would give 0 / 0; divided by the smallest number it stays 0, and its weight 1.
        factors = torch.exp(-losses / tau.clamp(min=torch.finfo(losses.dtype).tiny)).clamp(min=self.w_min)
        return torch.where(tau.isfinite(), factors, 1.0)
