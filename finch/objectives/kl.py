"""KL divergence from the pretrained model: a penalty on how far each next-token distribution has moved from where fine-tuning began.

    KL_t = sum_v p0(v) (log p0(v) - log p(v))        p0: the pretrained model's distribution of token t, p: the trained model's
    loss = objective + strength * mean of KL_t over the target tokens of the step

With plain cross-entropy this is SFT with a KL term, with DFT's weights it is ASFT: Zhu et al., "Anchored Supervised Fine-Tuning" (2025,
arXiv 2509.23753). Logits are [tokens, vocab] everywhere; KL_t is in nats, fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

import math
from typing import Any

import torch

REFERENCES = ("online", "cached")
DEFAULT_TOP_K = 64


class KL:
    """The settings of the penalty.

    The penalty is a term beside the objective: it goes with every one of them, and the loss that is logged, or sets FINCH's
    learning rate, stays cross-entropy.

    Args:
        strength: at least 0; ASFT's authors use 0.1. 0 leaves the gradients alone, and the divergence is still measured.
        reference: ``"online"``: the pretrained model runs beside the trained one, the divergence is exact. ``"cached"``: its ``top_k``
            most likely tokens at each target token are computed once; all other tokens count as one, which gives a lower bound.
        top_k: tokens of a cached distribution; None: 64.

    Raises:
        ValueError: an argument outside its range, named with its value.
    """

    def __init__(self, strength: float = 0.1, reference: str = "online", top_k: int | None = None) -> None:
        if isinstance(strength, bool) or not isinstance(strength, (int, float)):
            raise ValueError(f"strength={strength!r} must be a number, such as 0.1")
        if not (strength >= 0 and math.isfinite(strength)):
            raise ValueError(f"strength={strength} must be finite and not below 0: give 0.1, or 0 for no penalty")
        if reference not in REFERENCES:
            raise ValueError(f"reference={reference!r} must be 'online' or 'cached'")
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"top_k={top_k!r} must be a whole number above 0, such as {DEFAULT_TOP_K}")
        if top_k is not None and reference == "online":
            raise ValueError(f"top_k={top_k} belongs to reference='cached': reference='online' uses all tokens")
        self.strength = float(strength)
        self.reference = reference
        self.top_k = top_k or DEFAULT_TOP_K

    @property
    def is_online(self) -> bool:
        return self.reference == "online"


def token_kl(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL_t over the full vocabulary.

    Args:
        logits: [tokens, vocab] of the model in training.
        reference_logits: [tokens, vocab] of the pretrained model; detached.

    Returns:
        [tokens] in nats. The gradient is p - p0 as such: equal logits give exactly 0, value and gradient.
    """
    logits = _upcast(logits)
    with torch.no_grad():
        log_p, log_p0 = logits.log_softmax(-1), _upcast(reference_logits).log_softmax(-1)
        p0 = log_p0.exp()
        value = log_p0.sub_(log_p).mul_(p0).sum(-1)
        gradient = log_p.exp_().sub_(p0)
    return _with_gradient(logits, value, gradient)


def top_log_probs(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution of a token, coarsened to its ``top_k`` most likely tokens and the rest.

    Args:
        logits: [tokens, vocab].
        top_k: at most vocab; the rest is then empty.

    Returns:
        log-probabilities [tokens, top_k + 1], the last that of all other tokens together; the tokens [tokens, top_k] int64.
    """
    logits = _upcast(logits.detach())
    top = logits.topk(top_k).indices
    return _coarsen(logits, top)[0], top


def coarse_token_kl(logits: torch.Tensor, log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """KL_t between distributions over the given tokens and the rest as one: a lower bound of ``token_kl``, equal with all tokens.

    Args:
        logits: [tokens, vocab] of the model in training.
        log_probs: [tokens, top_k + 1] of the pretrained model, see :func:`top_log_probs`.
        tokens: [tokens, top_k] integers.

    Returns:
        [tokens] in nats.
    """
    logits = _upcast(logits)
    with torch.no_grad():
        log_q0, top = log_probs.to(logits.dtype), tokens.long()
        q0 = log_q0.exp()
        log_q, log_p, rest = _coarsen(logits, top)
        # An empty rest adds nothing: 0 * (-inf) would be NaN.
        value = torch.where(q0 > 0, q0 * (log_q0 - log_q), 0.0).sum(-1)
        # p - p0 at the top tokens. Elsewhere the rest's mass is shared as the trained model shares it: p - q0_rest * p / q_rest.
        gradient = log_p.exp() - q0[:, -1:] * rest
        gradient.scatter_add_(-1, top, -q0[:, :-1])
    return _with_gradient(logits, value, gradient)


def _coarsen(logits: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens ``top`` and of the rest, [tokens, top_k + 1]; of all, [tokens, vocab]; and each token's share of
    the rest, [tokens, vocab], 0 at the top tokens."""
    log_p = logits.log_softmax(-1)
    outside = log_p.scatter(-1, top, -math.inf)  # summed directly: 1 - sum(top) would lose a small rest to rounding
    log_rest = outside.logsumexp(-1, keepdim=True)
    share = (outside - log_rest).exp().nan_to_num()  # an empty rest has -inf - -inf
    return torch.cat([log_p.gather(-1, top), log_rest], -1), log_p, share


class _WithGradient(torch.autograd.Function):
    """A value per token whose gradient with respect to the logits is already known: one [tokens, vocab] tensor is kept for it."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output.unsqueeze(-1) * gradient, None, None


def _with_gradient(logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _WithGradient.apply(logits, value, gradient)
    return result


def _upcast(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
