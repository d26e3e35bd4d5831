"""The interface of an objective, plain cross-entropy, and the sequence losses that several objectives need.

The training loop computes, with w = ``weights`` and D = ``count``, both summed over the micro-batches and ranks of a step,

    loss = sum(w * token_loss) / D

and takes no step where D is 0.
"""

from __future__ import annotations

import math

import torch

IGNORE_INDEX = -100

Batch = dict[str, torch.Tensor]


class Objective:
    """What all objectives share. A subclass defines ``weights``, and ``count`` where its denominator is another.

    A batch holds ``labels``, [batch, seq] int64, shifted so that each is at the token that predicts it, -100 where ignored.
    In packed rows ``input_pos``, [batch, seq], restarts at 0 with each sequence; a token belongs to the sequence of its label.

    Attributes:
        needs: further keys of the batch. ``"pretrained_token_loss"``: [batch, seq] in nats, under the pretrained model, aligned
            with the labels. ``"top_logits"``: [batch, seq, 20], the largest logits of the model in training.
        statistic: None, ``"exact"``, ``"lagged"`` or ``"auto"``. If set, the loop gathers ``sequence_losses`` over all ranks and
            micro-batches of a step and puts their ``median``, [] in nats, into ``batch["statistic"]`` before it calls
            ``weights``. ``"exact"``: of this step. ``"lagged"``: the last finite one of an earlier step; the first step has
            none and uses its own. ``"auto"``: exact where a step has one micro-batch, else lagged.
        is_elementwise: whether a token's weight depends on no other token's ``token_loss`` or ``top_logits``; on what is in the batch
            before the forward pass, and on ``statistic``, it may. Loss and gradient are then computed in one pass over chunks of
            tokens, and ``weights`` is called for each chunk, with 0 for the tokens of later ones. False for a subclass that defines
            ``weights`` and does not set it.
    """

    needs: frozenset[str] = frozenset()
    statistic: str | None = None
    is_elementwise = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "weights" in vars(cls) and "is_elementwise" not in vars(cls):
            cls.is_elementwise = False

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The factor of each token's loss, [batch, seq], detached, fp32 (fp64 for fp64 losses).

        ``token_loss``: [batch, seq] cross-entropy in nats under the model in training; 0 at ignored labels, where the weight has no meaning but
        is finite. Raises ValueError if the batch lacks a key that the objective needs.
        """
        raise NotImplementedError

    def count(self, batch: Batch) -> torch.Tensor:
        """[] int64, this batch's share of the denominator: the number of its target tokens."""
        return (batch["labels"] != IGNORE_INDEX).sum()

    def prepare(self, token_losses: torch.Tensor, sequence_losses: torch.Tensor) -> str:
        """Called once before the first step, with the pretrained model's losses over the training set; returns a line for the log.

        ``token_losses``: [target tokens] in nats; ``sequence_losses``: [sequences with targets] in nats, the mean of each. Raises ValueError if
        the objective would ignore every token.
        """
        return f"the objective is {type(self).__name__}"

    def sequence_losses(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """f_s, each sequence's mean loss over its target tokens, from [batch, seq] in nats.

        Returns [sequences with targets] in nats, in the order of the batch; NaN where a target's loss is.
        """
        means, num_targets, _ = sequence_means(upcast(token_loss), batch)
        return means[num_targets > 0]


class CrossEntropy(Objective):
    """Plain supervised fine-tuning: every target token weighs 1, the denominator is their number."""

    is_elementwise = True

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] of ones."""
        return torch.ones_like(upcast(token_loss))


def median(values: torch.Tensor) -> torch.Tensor:
    """The median as numpy defines it: the mean of the middle two for an even number; [] on the device of ``values``, without a host read.

    torch.median returns the lower one, which in a batch of two sequences would always be the easier sequence. NaN is left out, so that
    ranks can pad their share with it before they gather; the result is NaN where there is no value.
    """
    values = values.detach().flatten()
    if values.numel() == 0:
        return values.new_full((), math.nan)
    ordered = values.sort().values  # NaN sorts last
    number = (~values.isnan()).sum()
    middle = torch.stack([(number - 1).clamp(min=0) // 2, number // 2])
    return ordered[middle].mean()


# For the objectives of this package.


def upcast(values: torch.Tensor) -> torch.Tensor:
    """The values, detached, in fp32 or wider."""
    values = values.detach()
    return values if values.dtype == torch.float64 else values.float()


def sequence_means(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean losses over the target tokens of each sequence, from ``losses`` [batch, seq] in nats.

    Returns:
        means: [batch * seq] in nats, one per sequence id; NaN without targets.
        num_targets: [batch * seq].
        ids: [batch, seq] each token's sequence id.
    """
    ids, is_target = _sequence_ids(batch), batch["labels"] != IGNORE_INDEX
    num_targets = _sum_per_sequence(is_target, ids)
    # Chosen, not multiplied by the mask: 0 * NaN at an ignored label would be NaN.
    sums = _sum_per_sequence(torch.where(is_target, losses, 0.0), ids)
    return (sums / num_targets).to(losses.dtype), num_targets, ids


def require_key(batch: Batch, key: str, objective: Objective) -> torch.Tensor:
    """``batch[key]``. Raises ValueError if the training loop has not put it there."""
    if key not in batch:
        raise ValueError(
            f"batch[{key!r}] is missing: {type(objective).__name__} needs it, and the training loop has to put it there"
        )
    return batch[key]


def positive_number(name: str, value: float | torch.Tensor, meaning: str) -> float:
    """``value`` as a float. Raises ValueError, ending in ``meaning``, if it is not a finite number above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, (str, bool)) or not (number > 0 and math.isfinite(number)):
        shown = number if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}={shown} must be finite and above 0: {meaning}")
    return number


def _sequence_ids(batch: Batch) -> torch.Tensor:
    """[batch, seq] an id below batch * seq for each token's sequence; a sequence's last token predicts into the next one."""
    labels = batch["labels"]
    positions = batch.get("input_pos")
    if positions is None:
        return torch.arange(labels.shape[0], device=labels.device).unsqueeze(1).expand_as(labels)
    starts = positions == 0
    starts[:, 0] = True  # also where a row begins inside a sequence
    ids = starts.flatten().cumsum(0).view_as(labels) - 1
    return torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)


def _sum_per_sequence(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[batch * seq] sums over the tokens of each sequence."""
    # The order of a GPU's atomic additions changes from run to run; in fp64 the difference stays below fp32's last digit.
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.zeros(ids.numel(), dtype=dtype, device=values.device)
    return sums.index_add(0, ids.flatten(), values.flatten().to(dtype))
