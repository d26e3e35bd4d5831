"""What each token's loss weighs in the objective.

An objective is two small functions on per-token losses:

    weights(token_loss, batch)  [batch, seq] -> [batch, seq]   detached factors of the token losses
    count(batch)                -> []                          this batch's share of the objective's denominator

``token_loss`` is cross-entropy in nats, 0 where the label is ignored; ``batch["labels"]`` is aligned with it (already
shifted), -100 where ignored. The training loop sums ``weights * token_loss`` over micro-batches and ranks and divides
by the sum of ``count``; where that is 0 there is nothing to learn from the step. Weights are made in fp32, or in fp64
for fp64 losses.

What an objective needs besides stands in the batch, and its class says so:

    needs       ``"pretrained_token_loss"``: [batch, seq], nats under the pretrained model, aligned with the labels
                ``"top_logits"``: [batch, seq, 20], the largest logits of the model in training
    statistic   ``"exact"`` or ``"lagged"``: before ``weights`` the loop gathers ``sequence_losses`` of all ranks and
                micro-batches of a step and puts their ``median`` into ``batch["statistic"]``, [] or a float: this
                step's, or the last finite one before it (the first step has none and takes its own)

In packed rows ``batch["input_pos"]``, [batch, seq], restarts at 0 with each sequence. A token belongs to the sequence
of its target, the token after it.

This file knows nothing of torchtune, of YAML or of ranks.
"""

from __future__ import annotations

import math

import torch

IGNORE_INDEX = -100

Batch = dict[str, torch.Tensor]


class Objective:
    """What all objectives share: a denominator that counts target tokens, and the mean loss of a sequence."""

    needs: frozenset[str] = frozenset()
    statistic: str | None = None

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] -> [batch, seq], detached and finite; the value at an ignored label means nothing."""
        raise NotImplementedError

    def count(self, batch: Batch) -> torch.Tensor:
        """[] this batch's share of the denominator."""
        return (batch["labels"] != IGNORE_INDEX).sum()

    def prepare(self, token_losses: torch.Tensor, sequence_losses: torch.Tensor) -> str:
        """Takes what the pretrained model says of the whole training set, once, before the first step.

        Args:
            token_losses: [target tokens] in nats.
            sequence_losses: [sequences with targets] in nats, each one's mean.

        Returns:
            A sentence for the log.

        Raises:
            ValueError: there would be nothing to learn.
        """
        return f"the objective is {type(self).__name__}"

    def sequence_losses(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """f_s, each sequence's mean loss over its target tokens.

        Args:
            token_loss: [batch, seq] in nats.

        Returns:
            [sequences with targets] in nats, in the order of the batch.
        """
        means, num_targets, _ = _sequence_means(_upcast(token_loss), batch)
        return means[num_targets > 0]


class CrossEntropy(Objective):
    """Plain supervised fine-tuning: every target token weighs 1, the denominator is their number."""

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.ones_like(_upcast(token_loss))


class FLOW(Objective):
    """Sequences that the pretrained model finds easy weigh more: exp(-f_s(theta0) / tau), the same in every epoch.

    "Upweighting Easy Samples in Fine-Tuning Mitigates Forgetting" (Sanyal et al., 2025). The denominator stays the
    number of target tokens. A sequence without a finite loss under the pretrained model weighs 0.

    Args:
        tau: in nats; the median of f_s(theta0) over the training set, see ``sequence_losses`` and ``median``. None:
            ``prepare`` sets it before the first step.

    Raises:
        ValueError: tau is not a finite number above 0, or is missing when weights are asked for.
    """

    needs = frozenset({"pretrained_token_loss"})

    def __init__(self, tau: float | None = None) -> None:
        self.tau = tau

    @property
    def tau(self) -> float | None:
        return self._tau

    @tau.setter
    def tau(self, tau: float | torch.Tensor | None) -> None:
        self._tau = (
            None
            if tau is None
            else _positive("tau", tau, "the pretrained model's median sequence loss over the training set, in nats")
        )

    def prepare(self, token_losses: torch.Tensor, sequence_losses: torch.Tensor) -> str:
        if self.tau is None:
            self.tau = median(sequence_losses)
        return f"FLOW: tau {self.tau:.4f} nats"

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.tau is None:
            raise ValueError(
                "tau=None: set it to the pretrained model's median sequence loss over the training set before the first step"
            )
        means, _, ids = _sequence_means(_upcast(_given(batch, "pretrained_token_loss", self)), batch)
        factors = torch.exp(-means / self.tau)
        return factors.nan_to_num(nan=0.0)[ids].to(_upcast(token_loss).dtype)


class DFT(Objective):
    """Each token's loss is scaled by its probability p = exp(-l) under the model in training, detached.

    "On the Generalization of SFT" (Wu et al., 2025). Without the detaching, the gradient of p * l would push tokens
    with p < 1/e further down. The denominator is the number of target tokens of the whole step.
    """

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.exp(-_upcast(token_loss))


class TALR(Objective):
    """Token-adaptive weights max(p^(1/tau), w_min): DFT whose sharpness follows the loss of the batch.

    "SFT Doesn't Always Hurt General Capabilities" (2025). p is the token's probability under the model in training.
    TALR(tau=1, w_min=0) is DFT.

    Where tau is not finite (no sequence of the step had a target, or the model has diverged) every weight is 1, so
    that a loss of 0 stays 0 and a loss that is not finite shows. At tau = 0, the limit: 1 where the loss is 0, w_min
    elsewhere.

    Args:
        tau: in nats. ``"exact"``: the median of f_s over the sequences of this step's batch, the definition; needs all
            forwards before the first backward, or the forwards twice. ``"lagged"``: the median of the step before,
            free. A number: constant.
        w_min: the least weight, in [0, 1].

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(self, tau: str | float = "lagged", w_min: float = 0.01) -> None:
        self._tau: float | None = None
        if isinstance(tau, str):
            if tau not in ("exact", "lagged"):
                raise ValueError(f"tau={tau!r} must be 'exact', 'lagged' or a number of nats above 0")
            self.statistic = tau
        else:
            self._tau = _positive("tau", tau, "a number of nats, or 'exact' or 'lagged'")
        if not (isinstance(w_min, (int, float)) and 0 <= w_min <= 1):
            raise ValueError(f"w_min={w_min!r} must lie in [0, 1]: it is the least weight of a token, 0.01 by default")
        self.w_min = float(w_min)

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        losses = _upcast(token_loss)
        if self._tau is not None:
            return torch.exp(-losses / self._tau).clamp(min=self.w_min)
        tau = torch.as_tensor(_given(batch, "statistic", self), dtype=losses.dtype, device=losses.device)
        factors = torch.exp(-losses / tau.clamp(min=torch.finfo(losses.dtype).tiny)).clamp(min=self.w_min)
        return torch.where(tau.isfinite(), factors, 1.0)


class STM(Objective):
    """Only tokens that the pretrained model finds easy are learnt: those with perplexity exp(l(theta0)) <= threshold.

    "Selective token masking" (Wu et al., "Clear Minds Think Alike", 2025). Masked tokens stay in the context. The
    denominator counts the tokens kept.

    Args:
        threshold: a perplexity, above 1; 2.5 in the paper, which masks 20 to 24% of its tokens.

    Raises:
        ValueError: threshold is not above 1.
    """

    needs = frozenset({"pretrained_token_loss"})

    def __init__(self, threshold: float = 2.5) -> None:
        if not (isinstance(threshold, (int, float)) and threshold > 1):
            raise ValueError(
                f"threshold={threshold!r} must be above 1: it is a perplexity, and at 1 or below no token is kept; 2.5 in the paper"
            )
        self.threshold = float(threshold)

    def prepare(self, token_losses: torch.Tensor, sequence_losses: torch.Tensor) -> str:
        kept, number = int((_upcast(token_losses) <= math.log(self.threshold)).sum()), token_losses.numel()
        if kept == 0:
            raise ValueError(
                f"STM with threshold={self.threshold:g} keeps 0 of {number} target tokens, since each has a perplexity above it under the "
                "pretrained model; raise threshold"
            )
        return f"STM: keeps {kept:,} of {number:,} target tokens ({kept / number:.1%})"

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._kept(batch).to(_upcast(token_loss).dtype)

    def count(self, batch: Batch) -> torch.Tensor:
        return self._kept(batch).sum()

    def _kept(self, batch: Batch) -> torch.Tensor:
        pretrained = _upcast(_given(batch, "pretrained_token_loss", self))
        # In nats, so that a CPU that counts and a GPU that weighs cannot differ by a rounding of exp.
        return (pretrained <= math.log(self.threshold)) & (batch["labels"] != IGNORE_INDEX)


class EAFT(Objective):
    """Tokens that the model is unsure about weigh more: the entropy of its 20 likeliest tokens over ln 20.

    "Entropy-Adaptive Fine-Tuning" (arXiv 2601.02151). Probabilities are renormalised among the 20. The denominator is
    the number of target tokens.
    """

    needs = frozenset({"top_logits"})
    num_logits = 20

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = _upcast(_given(batch, "top_logits", self))
        if logits.shape[-1] != self.num_logits:
            raise ValueError(
                f"batch['top_logits'] of shape {list(logits.shape)} must hold the {self.num_logits} largest logits of each token; "
                "a vocabulary smaller than that cannot be trained with EAFT"
            )
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)  # entr(0) = 0, where p * log(p) would be NaN
        return (entropy / math.log(self.num_logits)).to(_upcast(token_loss).dtype)


def median(values: torch.Tensor) -> torch.Tensor:
    """The median as numpy defines it: the mean of the middle two for an even number. torch.median takes the lower one,
    which in a batch of two sequences would always be the easier one.

    Args:
        values: any shape; NaN is left out, so that ranks can fill up their share with it before they gather.

    Returns:
        [] on the device of ``values``, unread; NaN where there is no value.
    """
    values = values.detach().flatten()
    if values.numel() == 0:
        return values.new_full((), math.nan)
    ordered = values.sort().values  # NaN goes last
    number = (~values.isnan()).sum()
    middle = torch.stack([(number - 1).clamp(min=0) // 2, number // 2])
    return ordered[middle].mean()


def _upcast(values: torch.Tensor) -> torch.Tensor:
    """Detached, in fp32 or wider."""
    values = values.detach()
    return values if values.dtype == torch.float64 else values.float()


def _sequence_ids(batch: Batch) -> torch.Tensor:
    """[batch, seq] a number for each token's sequence, below batch * seq; the last token of a sequence has the next one's."""
    labels = batch["labels"]
    positions = batch.get("input_pos")
    if positions is None:
        return torch.arange(labels.shape[0], device=labels.device).unsqueeze(1).expand_as(labels)
    starts = positions == 0
    starts[:, 0] = True  # also where a sequence goes on from an earlier row
    own = starts.flatten().cumsum(0).view_as(labels) - 1
    return torch.cat([own[:, 1:], own[:, -1:]], dim=1)


def _sequence_means(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[batch * seq] mean loss of each sequence, NaN without targets; their number; [batch, seq] each token's place there."""
    ids, is_target = _sequence_ids(batch), batch["labels"] != IGNORE_INDEX
    num_targets = _per_sequence(is_target, ids)
    return (_per_sequence(torch.where(is_target, losses, 0.0), ids) / num_targets).to(losses.dtype), num_targets, ids


def _per_sequence(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[batch * seq] sums over the tokens of each sequence."""
    # The order of a GPU's atomic additions changes from run to run; in fp64 that stays below fp32's last digit.
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.zeros(ids.numel(), dtype=dtype, device=values.device)
    return sums.index_add(0, ids.flatten(), values.flatten().to(dtype))


def _given(batch: Batch, key: str, objective: Objective) -> torch.Tensor:
    if key not in batch:
        raise ValueError(
            f"batch[{key!r}] is missing: {type(objective).__name__} needs it, and the training loop has to put it there"
        )
    return batch[key]


def _positive(name: str, value: float | torch.Tensor, meaning: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, (str, bool)) or not (number > 0 and math.isfinite(number)):
        shown = number if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}={shown} must be finite and above 0: {meaning}")
    return number
