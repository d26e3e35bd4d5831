"""The pretrained model's most likely tokens at every target token of the training set, computed in one pass before training.

What the KL penalty compares with where it does not run the pretrained model at each step. It is cached beside the run under a fingerprint,
and is never computed with tuned weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finch.data.loader import Batch, EvalLoader
from finch.data.order import EMPTY
from finch.objectives import IGNORE_INDEX
from finch.training.dataset_loss import iter_token_losses
from finch.training.reference_loss import row_span


@dataclass(frozen=True)
class ReferenceTopK:
    """Distributions over the most likely tokens and the rest as one, see :func:`finch.objectives.kl.top_log_probs`.

    Attributes:
        log_probs: [target tokens, top_k + 1] fp32 (fp64 for an fp64 model), row after row in the dataset's order. Rows that a
            mixture never draws have none.
        tokens: [target tokens, top_k] int32.
        ends: [rows] int64, where each row's target tokens end.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    ends: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return sum(values.numel() * values.element_size() for values in (self.log_probs, self.tokens))

    def add_to(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch with the distributions of its target tokens, as :class:`finch.training.chunked_loss.TokenLoss` takes them.

        Args:
            batch: on the host.
            rows: the dataset indices of its samples, in their order.
        """
        spans = [row_span(self.ends, index) for index in rows]
        return {
            **batch,
            "reference_log_probs": torch.cat([self.log_probs[span] for span in spans]),
            "reference_tokens": torch.cat([self.tokens[span] for span in spans]),
        }


def compute_reference_top_k(model: nn.Module, loader: EvalLoader, top_k: int) -> ReferenceTopK:
    """One pass over the training rows that are drawn, in evaluation mode; a collective. Every rank gets all rows."""
    indices: list[int] = []
    num_targets, log_probs, tokens = [], [], []
    outputs: Any
    for rows, batch, outputs in iter_token_losses(_WithTopK(model, top_k), loader):
        indices += rows
        num_targets.append((batch["labels"] != IGNORE_INDEX).sum(1))
        log_probs.append(outputs["top_log_probs"].cpu().flatten(0, 1)[batch["targets"]])
        tokens.append(outputs["top_tokens"].cpu().flatten(0, 1)[batch["targets"]].int())
    share = (indices, torch.cat(num_targets).tolist(), torch.cat(log_probs), torch.cat(tokens))
    return _merge(loader.parallel.gather(share), len(loader.samples))


def _merge(shares: list[tuple[list[int], list[int], torch.Tensor, torch.Tensor]], num_rows: int) -> ReferenceTopK:
    """The ranks' shares in the order of the rows."""
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for indices, num_targets, log_probs, tokens in shares:
        rows = zip(indices, log_probs.split(num_targets), tokens.split(num_targets), strict=True)
        parts |= {index: (row_log_probs, row_tokens) for index, row_log_probs, row_tokens in rows if index != EMPTY}
    order = sorted(parts)
    ends = torch.tensor([len(parts[index][0]) if index in parts else 0 for index in range(num_rows)]).cumsum(0)
    return ReferenceTopK(
        torch.cat([parts[index][0] for index in order]), torch.cat([parts[index][1] for index in order]), ends
    )


class _WithTopK(nn.Module):
    """A model that returns its most likely tokens at each forward pass."""

    def __init__(self, model: nn.Module, top_k: int) -> None:
        super().__init__()
        self.model, self.top_k = model, top_k

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, num_top_log_probs=self.top_k)
