"""From tokens to the loss of every token: the decoder, its output layer and the cross-entropy as one module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules import TransformerDecoder

from finch.objectives import IGNORE_INDEX


class TokenLoss(nn.Module):
    """A torchtune decoder that returns token losses in place of logits; the root module that FSDP2 wraps.

    Output layer and cross-entropy live inside its forward, so that a head tied to the embedding is gathered while it
    is used, and so that the way from hidden states to losses can change without any objective knowing.

    Args:
        decoder: a :class:`torchtune.modules.TransformerDecoder`.
        num_chunks: in how many pieces logits are made; more take less memory at a time.
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
        self, tokens: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor:
        """
        Args:
            tokens: [batch, seq] int64.
            labels: [batch, seq] int64, already shifted: ``labels[:, t]`` is the token after ``tokens[:, t]``; -100 where
                ignored.
            targets: [number of targets] int64, places in the flattened labels that are not -100. With it logits are made
                there alone: prompts and padding cost neither time nor memory in the output layer. Counted on the host
                by the collator, since a GPU would have to be waited for.
            inputs: the decoder's other arguments (``mask``, ``input_pos``).

        Returns:
            [batch, seq] cross-entropy in nats, fp32 (fp64 for an fp64 model), 0 where the label is ignored.
        """
        with self.offloading:  # the layers' activations alone: logits would be too large to move
            hidden = self.decoder(tokens, **inputs)
        hidden, wanted = hidden.flatten(0, 1), labels.flatten()
        if targets is not None:
            hidden, wanted = hidden.index_select(0, targets), wanted.index_select(0, targets)
        hidden = self.decoder.norm(hidden)
        pieces = zip(hidden.chunk(self.num_chunks), wanted.chunk(self.num_chunks), strict=True)
        losses = torch.cat([self.cross_entropy(self.decoder.output(piece), label) for piece, label in pieces])
        if targets is not None:
            losses = losses.new_zeros(labels.numel()).index_copy(0, targets, losses)
        return losses.view_as(labels).clone()  # FSDP2 hooks the output and wants a tensor that is no view


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``logits``: [tokens, vocab]; ``labels``: [tokens]. Returns [tokens] in nats, from fp32 or wider."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden
