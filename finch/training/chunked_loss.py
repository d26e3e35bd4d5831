"""From tokens to the loss of every token: decoder, output layer and cross-entropy as one module. Logits are computed in chunks."""

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
    """A torchtune decoder that returns token losses instead of logits; the root module that FSDP2 wraps.

    Output layer and cross-entropy are part of its forward, so that FSDP2 gathers a head tied to the embedding while it is
    used, and so that chunking stays invisible to objectives.

    Args:
        decoder: a :class:`torchtune.modules.TransformerDecoder`.
        num_chunks: in how many chunks logits are computed. 1 keeps them for the backward; more keep none and recompute each
            chunk there, for one more product with the output layer.
    """

    decoder: TransformerDecoder

    def __init__(self, decoder: TransformerDecoder, num_chunks: int = 1) -> None:
        super().__init__()
        self.decoder = decoder
        self.num_chunks = num_chunks
        self.offloading: AbstractContextManager[Any] = nullcontext()
        # The decoder's forward ends in `unembed` (final norm and output layer). It moves here, next to the loss.
        decoder.unembed = _identity
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
            targets: [number of targets] int64, positions in the flattened labels that are not -100. With it logits are computed
                there alone: prompts and padding cost neither time nor memory in the output layer. The collator counts them on
                the host, since doing it on a GPU would need a synchronisation.
            num_top_logits: how many of each token's largest logits to return as well.
            inputs: the decoder's other arguments (``mask``, ``input_pos``).

        Returns:
            [batch, seq] cross-entropy in nats, fp32 (fp64 for an fp64 model), 0 where the label is ignored; with
            ``num_top_logits`` also [batch, seq, num_top_logits], detached, 0 there.
        """
        with self.offloading:  # the layers' activations alone: logits would be too large to move
            hidden = self.decoder(tokens, **inputs)
        hidden, flat_labels = hidden.flatten(0, 1), labels.flatten()
        if targets is not None:
            hidden, flat_labels = hidden.index_select(0, targets), flat_labels.index_select(0, targets)
        hidden = self.decoder.norm(hidden)
        chunks = zip(hidden.chunk(self.num_chunks), flat_labels.chunk(self.num_chunks), strict=True)
        # With several chunks the backward recomputes the logits: nothing of [tokens, vocab] outlives the forward.
        recompute = self.num_chunks > 1 and torch.is_grad_enabled()
        outputs = [
            checkpoint(self._chunk_losses, *chunk, num_top_logits, use_reentrant=False)
            if recompute
            else self._chunk_losses(*chunk, num_top_logits)
            for chunk in chunks
        ]
        losses = _scatter(torch.cat([losses for losses, _ in outputs]), targets, labels)
        if not num_top_logits:
            return losses
        return losses, _scatter(torch.cat([top for _, top in outputs]), targets, labels)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The decoder's parameters that require gradients, by name."""
        return {name: weight for name, weight in self.decoder.named_parameters() if weight.requires_grad}

    def _chunk_losses(
        self, hidden: torch.Tensor, labels: torch.Tensor, num_top_logits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden``: [tokens, embed]; ``labels``: [tokens]. Returns [tokens] and [tokens, num_top_logits]."""
        logits = self.decoder.output(hidden)
        num_top_logits = min(
            num_top_logits, logits.shape[-1]
        )  # the objective raises for a vocabulary that is too small
        top = logits.detach().topk(num_top_logits).values if num_top_logits else logits.new_empty(len(labels), 0)
        return self.cross_entropy(logits, labels), top


def _scatter(values: torch.Tensor, targets: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
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
