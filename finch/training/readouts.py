"""What is read off the logits of each target token, chunk by chunk: its loss, its largest logits, a distribution, a divergence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from finch.data.loader import Batch
from finch.objectives.regularization import coarse_token_kl, token_kl, top_log_probs

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Readout:
    """Something that is read off logits.

    Attributes:
        of: from ``logits`` [tokens, vocab], ``labels`` [tokens] and ``rows`` to outputs by name, [tokens, ...].
        rows: what else it needs of each target, [targets, ...].
        rows_in: computes ``rows`` inside of the forward, from the :class:`finch.training.chunked_loss.TokenLoss` and the batch; None: they are known.
        is_wide: whether it takes further tensors as large as the logits.
    """

    of: Callable[..., Outputs]
    rows: tuple[torch.Tensor, ...] = ()
    rows_in: Callable[[Any, Batch], tuple[torch.Tensor, ...]] | None = None
    is_wide: bool = False

    def with_rows(self, model: Any, batch: Batch) -> Readout:
        """The same with its ``rows``."""
        return self if self.rows_in is None else replace(self, rows=self.rows_in(model, batch), rows_in=None)


def read(readouts: Sequence[Readout], logits: torch.Tensor, labels: torch.Tensor, *rows: torch.Tensor) -> Outputs:
    """The outputs of all; ``rows``: theirs, one after the other."""
    outputs: Outputs = {}
    for readout in readouts:
        own, rows = rows[: len(readout.rows)], rows[len(readout.rows) :]
        outputs |= readout.of(logits, labels, *own)
    return outputs


def top_logits(number: int) -> Readout:
    """``top_logits``: each token's largest logits, [..., number], detached; all of a vocabulary that is smaller."""
    return Readout(lambda logits, _: {"top_logits": logits.detach().topk(min(number, logits.shape[-1])).values})


def top_tokens(number: int) -> Readout:
    """``top_log_probs`` and ``top_tokens``, see :func:`finch.objectives.regularization.top_log_probs`."""
    names = ("top_log_probs", "top_tokens")
    return Readout(
        lambda logits, _: dict(zip(names, top_log_probs(logits, min(number, logits.shape[-1])), strict=True))
    )


def chosen(choose: Callable[[torch.Tensor], torch.Tensor]) -> Readout:
    """``chosen``: what ``choose`` makes of logits [tokens, vocab], [tokens] int64."""
    return Readout(lambda logits, _: {"chosen": choose(logits.detach())})


def kl_from(log_probs: torch.Tensor, tokens: torch.Tensor, name: str = "kl") -> Readout:
    """The KL divergence in nats, with its graph, from distributions that :func:`top_tokens` has read: [targets, number + 1] and [targets, number]."""
    return Readout(lambda logits, _, *rows: {name: coarse_token_kl(logits, *rows)}, (log_probs, tokens), is_wide=True)


def kl_from_pretrained(model: Any) -> Readout:
    """``kl``: that from the pretrained model of a :class:`finch.training.chunked_loss.TokenLoss`, which runs in the same forward."""
    return Readout(
        lambda logits, _, hidden: {"kl": token_kl(logits, model.reference_logits(hidden))},
        rows_in=lambda model, batch: (model.reference_hidden(batch),),
        is_wide=True,
    )
