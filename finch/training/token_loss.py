"""From tokens to the loss of every token: the decoder, its output layer and the cross-entropy as one module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TransformerDecoder

from finch.objectives import IGNORE_INDEX


class TokenLoss(nn.Module):
    """A torchtune decoder that returns token losses in place of logits; the root module that FSDP2 wraps.

    Output layer and cross-entropy live inside its forward, so that a head tied to the embedding is gathered while it
    is used, and so that the way from hidden states to losses can change without any objective knowing.

    Args:
        decoder: a :class:`torchtune.modules.TransformerDecoder`.
        num_chunks: in how many pieces logits are made. 1 keeps them for the backward; more keep none and make each
            piece once more there, for one more product with the output layer.
    """

    decoder: TransformerDecoder

    def __init__(self, decoder: TransformerDecoder, num_chunks: int = 1) -> None:
        super().__init__()
        self.decoder = decoder
        self.num_chunks = num_chunks
        self.offloading: AbstractContextManager = nullcontext()
        # The decoder's forward ends in `unembed` (final norm and output layer). It moves here, next to the loss.
        decoder.unembed = _identity  # type: ignore[assignment]
        self.cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        num_top_logits: int = 0,
        **inputs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            tokens: [batch, seq] int64.
            labels: [batch, seq] int64, already shifted: ``labels[:, t]`` is the token after ``tokens[:, t]``; -100 where
                ignored.
            targets: [number of targets] int64, places in the flattened labels that are not -100. With it logits are made
                there alone: prompts and padding cost neither time nor memory in the output layer. Counted on the host
                by the collator, since a GPU would have to be waited for.
            num_top_logits: how many of each token's largest logits to return as well.
            inputs: the decoder's other arguments (``mask``, ``input_pos``).

        Returns:
            [batch, seq] cross-entropy in nats, fp32 (fp64 for an fp64 model), 0 where the label is ignored; with
            ``num_top_logits`` also [batch, seq, num_top_logits], detached, 0 there.
        """
        with self.offloading:  # the layers' activations alone: logits would be too large to move
            hidden = self.decoder(tokens, **inputs)
        hidden, wanted = hidden.flatten(0, 1), labels.flatten()
        if targets is not None:
            hidden, wanted = hidden.index_select(0, targets), wanted.index_select(0, targets)
        hidden = self.decoder.norm(hidden)
        pieces = zip(hidden.chunk(self.num_chunks), wanted.chunk(self.num_chunks), strict=True)
        # In chunks, logits are made once more in the backward: after the forward none of [tokens, vocab] is left.
        once_more = self.num_chunks > 1 and torch.is_grad_enabled()
        found = [
            checkpoint(self._losses_of, piece, label, num_top_logits, use_reentrant=False)
            if once_more
            else self._losses_of(piece, label, num_top_logits)
            for piece, label in pieces
        ]
        losses = _in_place(torch.cat([part[0] for part in found]), targets, labels)
        if not num_top_logits:
            return losses
        return losses, _in_place(torch.cat([part[1] for part in found]), targets, labels)

    def _losses_of(
        self, hidden: torch.Tensor, labels: torch.Tensor, num_top_logits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden``: [tokens, embed]; ``labels``: [tokens]. Returns [tokens] and [tokens, num_top_logits]."""
        logits = self.decoder.output(hidden)
        num_top_logits = min(num_top_logits, logits.shape[-1])  # the objective tells that a vocabulary is too small
        top = logits.detach().topk(num_top_logits).values if num_top_logits else logits.new_empty(len(labels), 0)
        return self.cross_entropy(logits, labels), top


def _in_place(values: torch.Tensor, targets: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """[targets, ...] to [batch, seq, ...], 0 elsewhere; no view, since FSDP2 hooks what the root returns."""
    if targets is not None:
        values = values.new_zeros(labels.numel(), *values.shape[1:]).index_copy(0, targets, values)
    return values.view(*labels.shape, *values.shape[1:]).clone()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``logits``: [tokens, vocab]; ``labels``: [tokens]. Returns [tokens] in nats, from fp32 or wider."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden
