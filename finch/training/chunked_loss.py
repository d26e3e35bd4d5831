"""From tokens to the loss of every token: decoder, output layer and cross-entropy as one module. Logits are computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter

from finch.data.loader import Batch
from finch.objectives import IGNORE_INDEX
from finch.training.one_pass_loss import Weighting, head_of, one_pass
from finch.training.padding_free_attention import Way, through_layers
from finch.training.readouts import Outputs, Readout, read

LOGITS_BYTES = 2**28
"""Bytes of the fp32 logits that are computed at a time. Where all fit they are kept for the backward: that saves a product with the head."""


def chunks_for(num_tokens: int, vocab_size: int, num_chunks: int, *, has_kl: bool = False) -> int:
    """In how many chunks the logits of ``num_tokens`` tokens are computed.

    With ``num_chunks`` 1 there is one wherever there is a gradient; otherwise as few as leave at most ``LOGITS_BYTES`` to each: every chunk
    rounds the head's gradient. ``has_kl`` halves the chunks of several, since the KL divergence takes twice as many tensors of that size.
    """
    num_bytes = 4 * num_tokens * vocab_size
    if (num_chunks == 1 and torch.is_grad_enabled()) or num_bytes <= LOGITS_BYTES:
        return 1
    return -(-num_bytes // (LOGITS_BYTES // 2 if has_kl else LOGITS_BYTES))


class TokenLoss(nn.Module):
    """A torchtune decoder that returns token losses instead of logits; the root module that FSDP2 wraps.

    Output layer and cross-entropy are part of its forward, so that FSDP2 gathers a head tied to the embedding while it is
    used, and so that chunking stays invisible to objectives. The pretrained model is in the same root for the same reason: the
    KL divergence needs both heads, chunk by chunk.

    Args:
        decoder: a :class:`torchtune.modules.TransformerDecoder`.
        num_chunks: whether logits are computed in chunks, if above 1: see ``chunks_for``. One is kept for the backward; of several none is:
            see :mod:`finch.training.one_pass_loss`, or where that cannot be used each is recomputed in the backward.
        reference: the pretrained model, frozen, which runs only for the KL divergence; None: ``decoder`` without its adapters.

    Attributes:
        way: how the attention layers accept a :class:`finch.data.padding_free.PaddingFree`, if they do.
    """

    decoder: TransformerDecoder
    reference: TransformerDecoder | None

    def __init__(
        self, decoder: TransformerDecoder, num_chunks: int = 1, reference: TransformerDecoder | None = None
    ) -> None:
        super().__init__()
        self.decoder, self.reference = decoder, reference
        self.num_chunks = num_chunks
        self.way: Way = "padded"
        self.offloading: AbstractContextManager[Any] = nullcontext()
        # A decoder's forward ends in `unembed` (final norm and output layer). It moves here, next to the loss.
        for each in (decoder, reference):
            if each is not None:
                each.unembed = _identity
        self.cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy

    def forward(
        self,
        batch: Batch,
        readouts: Sequence[Readout] = (),
        weighting: Weighting | None = None,
        replayed: Readout | None = None,
    ) -> Outputs:
        """
        Args:
            batch: what :func:`finch.data.loader.model_inputs` leaves of one. ``tokens`` [batch, seq] int64. ``labels`` [batch, seq] int64, already
                shifted: ``labels[:, t]`` is the token after ``tokens[:, t]``; -100 where ignored. With replayed rows, which are the last of
                ``tokens``, it has fewer rows. ``targets`` [number of targets] int64, positions in the flattened labels that are not -100: with
                it logits are computed only there, and prompts and padding cost neither time nor memory in the output layer. The collator
                counts them on the host, since doing it on a GPU would need a synchronisation. ``layout``: the same tokens without
                padding, on which the decoder's layers then run where ``way`` is not "padded". ``replay_targets`` [number] int64, those of
                replayed rows, in the flattened ``tokens``. ``mask`` and ``input_pos``: the decoder's.
            readouts: what to return besides the loss.
            weighting: how the outputs are summed to what is differentiated.
            replayed: what is read at ``replay_targets``, and summed.

        Returns:
            ``loss``, [batch, seq] cross-entropy in nats, fp32 (fp64 for an fp64 model), and those of ``readouts``, [batch, seq, ...]; 0 where the
            label is ignored. With ``weighting`` also ``total`` [] with its graph, and all else is detached but the outputs of ``replayed``, [].
        """
        labels, targets = batch["labels"], batch.get("targets")
        # Before the decoder: FSDP2 prefetches in the backward what came last in the forward.
        readouts = [Readout(self._losses), *(each.with_rows(self, batch) for each in readouts)]
        every = targets
        if targets is not None and "replay_targets" in batch:
            every = torch.cat([targets, batch["replay_targets"]])
        with self.offloading:  # only the layers' activations: logits would be too large to move
            hidden = self._hidden(self.decoder, batch, every)
        flat_labels = _at_targets(labels.flatten(), targets)
        hidden = rest = self.decoder.norm(hidden)
        if "replay_targets" in batch:  # else the backward of a part would fill a tensor of zeros
            hidden, rest = hidden.tensor_split([len(flat_labels)])
        num_chunks = self._num_chunks(len(hidden), has_kl=any(each.is_wide for each in readouts))
        head = None if _keeps_logits(num_chunks) or weighting is None else head_of(self.decoder.output, weighting)
        if head is not None and weighting is not None:
            positions = torch.arange(labels.numel(), device=labels.device) if targets is None else targets
            places: dict[str, Any] = {"positions": positions, "shape": labels.shape, "num_chunks": num_chunks}
            outputs = one_pass(head, hidden, flat_labels, readouts, weighting, **places)
        else:
            found = self._in_chunks(hidden, flat_labels, readouts, num_chunks)
            outputs = {name: scatter(values, targets, labels) for name, values in found.items()}
            if weighting is not None:
                detached = {name: values.detach() for name, values in outputs.items()}
                outputs = {**detached, "total": weighting.total(weighting.weights(detached), outputs)}
        if replayed is not None:
            found = self._in_chunks(rest, None, [replayed], self._num_chunks(len(rest), has_kl=True))
            outputs |= {name: values.sum() for name, values in found.items()}
        return outputs

    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> Outputs:
        return {"loss": self.cross_entropy(logits, labels)}

    def _num_chunks(self, num_tokens: int, *, has_kl: bool) -> int:
        # The embedding gives the vocabulary's size: a tied output layer has no weight of its own.
        return chunks_for(num_tokens, len(self.decoder.tok_embeddings.weight), self.num_chunks, has_kl=has_kl)

    def _in_chunks(
        self, hidden: torch.Tensor, labels: torch.Tensor | None, readouts: Sequence[Readout], num_chunks: int
    ) -> Outputs:
        """What is read of ``hidden`` [tokens, embed], [tokens, ...]; logits are recomputed in the backward where they are not kept."""

        def read_chunk(hidden: torch.Tensor, *inputs: torch.Tensor) -> Outputs:
            return read(readouts, self.decoder.output(hidden), *inputs)

        labels = hidden.new_zeros(len(hidden)) if labels is None else labels
        inputs = (hidden, labels, *(row for each in readouts for row in each.rows))
        is_kept = _keeps_logits(num_chunks)
        chunks = [
            read_chunk(*chunk) if is_kept else checkpoint(read_chunk, *chunk, use_reentrant=False)
            for chunk in zip(*(each.chunk(num_chunks) for each in inputs), strict=True)
        ]
        return {name: torch.cat([each[name] for each in chunks]) for name in chunks[0]}

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The decoder's parameters that require gradients, by name."""
        return {name: weight for name, weight in self.decoder.named_parameters() if weight.requires_grad}

    def _hidden(self, decoder: TransformerDecoder, batch: Batch, targets: torch.Tensor | None) -> torch.Tensor:
        """[targets, embed] what the last layer returns at the targets, without them [batch * seq, embed]."""
        tokens, layout = batch["tokens"], batch.get("layout")
        if layout is None or self.way == "padded":
            inputs = {name: batch[name] for name in ("mask", "input_pos") if name in batch}
            return _at_targets(decoder(tokens, **inputs).flatten(0, 1), targets)
        # Not the decoder's forward, which refuses a row longer than its context.
        hidden = through_layers(decoder.layers, decoder.tok_embeddings, tokens, layout, self.way)
        # The layout has replayed rows' targets too, after all others; the reference is asked for the first ones only.
        return hidden.index_select(0, layout.targets if targets is None else layout.targets[: len(targets)])

    @torch.no_grad()
    def reference_hidden(self, batch: Batch) -> torch.Tensor:
        """[targets, embed] the pretrained model's hidden states after the final norm, in evaluation mode; within :meth:`forward`."""
        reference = self.decoder if self.reference is None else self.reference
        was_training = reference.training
        reference.eval()
        with disable_adapter(reference):
            hidden = self._hidden(reference, batch, batch.get("targets"))
        reference.train(was_training)
        return reference.norm(hidden)

    @torch.no_grad()
    def reference_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab] the pretrained model's, from [tokens, embed]; within :meth:`forward`."""
        output = (self.decoder if self.reference is None else self.reference).output
        is_module = isinstance(output, nn.Module)  # a tied output layer is none, and has no adapter
        with disable_adapter(output) if is_module else nullcontext():
            return output(hidden)


def _keeps_logits(num_chunks: int) -> bool:
    """Whether logits are kept for the backward: of several chunks nothing of [tokens, vocab] outlives the forward."""
    return num_chunks == 1 or not torch.is_grad_enabled()


def _at_targets(values: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
    return values if targets is None else values.index_select(0, targets)


def scatter(values: torch.Tensor, targets: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
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
