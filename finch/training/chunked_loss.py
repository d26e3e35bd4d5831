"""From tokens to the loss of every token: decoder, output layer and cross-entropy as one module. Logits are computed in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter

from finch.data.padding_free import PaddingFree
from finch.objectives import IGNORE_INDEX
from finch.objectives.regularization import coarse_token_kl, token_kl, top_log_probs
from finch.training.one_pass_loss import Weighting, head_of, one_pass
from finch.training.padding_free_attention import Way, through_layers

T = TypeVar("T")
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
        tokens: torch.Tensor,
        labels: torch.Tensor,
        targets: torch.Tensor | None = None,
        layout: PaddingFree | None = None,
        *,
        num_top_logits: int = 0,
        num_top_log_probs: int = 0,
        has_kl: bool = False,
        reference_log_probs: torch.Tensor | None = None,
        reference_tokens: torch.Tensor | None = None,
        choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
        has_replay_kl: bool = False,
        replay_targets: torch.Tensor | None = None,
        replay_log_probs: torch.Tensor | None = None,
        replay_tokens: torch.Tensor | None = None,
        weighting: Weighting | None = None,
        **inputs: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        Args:
            tokens: [batch, seq] int64.
            labels: [batch, seq] int64, already shifted: ``labels[:, t]`` is the token after ``tokens[:, t]``; -100 where
                ignored. With replayed rows, which are the last of ``tokens``, it has fewer rows.
            targets: [number of targets] int64, positions in the flattened labels that are not -100. With it logits are computed
                only there: prompts and padding cost neither time nor memory in the output layer. The collator counts them on
                the host, since doing it on a GPU would need a synchronisation.
            layout: the same tokens without padding, on which the decoder's layers then run where ``way`` is not "padded".
            num_top_logits: how many of each token's largest logits to return as well.
            num_top_log_probs: of how many of each token's most likely tokens to return the log-probabilities, see
                :func:`finch.objectives.regularization.top_log_probs`.
            has_kl: whether to return the KL divergence from the pretrained model as well.
            reference_log_probs, reference_tokens: [number of targets, top_k + 1] and [number of targets, top_k], the pretrained
                model's distributions, see :func:`finch.objectives.regularization.top_log_probs`. Without them it runs here.
            choose: from logits [tokens, vocab] to tokens [tokens] int64, which are returned as well.
            has_replay_kl: whether to return the sum of the KL divergence over the replayed tokens as well.
            replay_targets, replay_log_probs, replay_tokens: of replayed rows: [number] positions in the flattened ``tokens``, after all
                ``targets``; [number, top_k + 1] and [number, top_k] as of the reference.
            weighting: how the outputs are summed to what is differentiated.
            inputs: the decoder's other arguments (``mask``, ``input_pos``).

        Returns:
            [batch, seq] cross-entropy in nats, fp32 (fp64 for an fp64 model), 0 where the label is ignored. With one of the options
            a dictionary of it, ``loss``, and of ``top_logits`` [batch, seq, num_top_logits], ``top_log_probs`` and ``top_tokens``,
            all detached, ``chosen`` [batch, seq], and ``kl`` [batch, seq] in nats with its graph; 0 where the label is ignored. With
            ``weighting`` the dictionary also has ``total`` [] with its graph, and all else is detached but ``replay_kl`` [] in nats, which
            is there if there are replayed rows.
        """
        reference: list[torch.Tensor] = []
        if has_kl and reference_log_probs is not None and reference_tokens is not None:
            reference = [reference_log_probs, reference_tokens]
        elif has_kl:  # before the decoder: FSDP2 prefetches in the backward what came last in the forward
            reference = [self._reference_hidden(tokens, targets, layout, inputs)]
        every = targets
        if targets is not None and replay_targets is not None:
            every = torch.cat([targets, replay_targets])
        with self.offloading:  # only the layers' activations: logits would be too large to move
            hidden = self._hidden(self.decoder, tokens, every, layout, inputs)
        flat_labels = _at_targets(labels.flatten(), targets)
        hidden = self.decoder.norm(hidden)
        if replay_targets is not None:
            hidden, replayed = hidden[: len(flat_labels)], hidden[len(flat_labels) :]
        # The embedding gives the vocabulary's size: a tied output layer has no weight of its own.
        num_chunks = chunks_for(
            len(hidden), self.decoder.tok_embeddings.weight.shape[0], self.num_chunks, has_kl=has_kl
        )
        token_outputs = functools.partial(
            self._token_outputs, num_top_logits=num_top_logits, num_top_log_probs=num_top_log_probs, choose=choose
        )
        head = None if _keeps_logits(num_chunks) or weighting is None else head_of(self.decoder.output, weighting)
        if head is not None and weighting is not None:
            positions = torch.arange(labels.numel(), device=labels.device) if targets is None else targets
            outputs = one_pass(
                head,
                hidden,
                (flat_labels, *reference),
                token_outputs,
                weighting,
                positions=positions,
                shape=labels.shape,
                num_chunks=num_chunks,
            )
        else:
            chunks = self._in_chunks(token_outputs, (hidden, flat_labels, *reference), num_chunks)
            outputs = {
                name: _scatter(torch.cat([each[name] for each in chunks]), targets, labels) for name in chunks[0]
            }
            if weighting is not None:
                detached = {name: values.detach() for name, values in outputs.items()}
                outputs = {**detached, "total": weighting.total(weighting.weights(detached), outputs)}
        if has_replay_kl and replay_log_probs is not None and replay_tokens is not None:
            outputs["replay_kl"] = self._replay_kl(replayed, replay_log_probs, replay_tokens)
        return outputs["loss"] if len(outputs) == 1 else outputs

    def _in_chunks(self, outputs_of: Callable[..., T], inputs: Sequence[torch.Tensor], num_chunks: int) -> list[T]:
        """``outputs_of`` each chunk's logits and further ``inputs``, of which the first are hidden states; recomputed where they are not kept."""

        def chunk_outputs(hidden: torch.Tensor, *others: torch.Tensor) -> T:
            return outputs_of(self.decoder.output(hidden), *others)

        is_kept = _keeps_logits(num_chunks)
        return [
            chunk_outputs(*chunk) if is_kept else checkpoint(chunk_outputs, *chunk, use_reentrant=False)
            for chunk in zip(*(each.chunk(num_chunks) for each in inputs), strict=True)
        ]

    def _replay_kl(self, *inputs: torch.Tensor) -> torch.Tensor:
        """[] the sum over replayed tokens in nats, from hidden states [tokens, embed] and the pretrained model's distributions."""
        vocabulary = self.decoder.tok_embeddings.weight.shape[0]
        num_chunks = chunks_for(len(inputs[0]), vocabulary, self.num_chunks, has_kl=True)
        return torch.cat(self._in_chunks(coarse_token_kl, inputs, num_chunks)).sum()

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The decoder's parameters that require gradients, by name."""
        return {name: weight for name, weight in self.decoder.named_parameters() if weight.requires_grad}

    def _token_outputs(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        *reference: torch.Tensor,
        num_top_logits: int,
        num_top_log_probs: int,
        choose: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> dict[str, torch.Tensor]:
        """``logits`` [tokens, vocab], ``labels`` [tokens], ``reference``: hidden states [tokens, embed], or top log-probabilities and their tokens."""
        outputs = {"loss": self.cross_entropy(logits, labels)}
        if num_top_logits:  # the objective raises for a vocabulary that is too small
            outputs["top_logits"] = logits.detach().topk(min(num_top_logits, logits.shape[-1])).values
        if num_top_log_probs:
            top_k = min(num_top_log_probs, logits.shape[-1])
            outputs["top_log_probs"], outputs["top_tokens"] = top_log_probs(logits, top_k)
        if choose is not None:
            outputs["chosen"] = choose(logits.detach())
        if len(reference) == 1:
            outputs["kl"] = token_kl(logits, self._reference_logits(*reference))
        elif reference:
            outputs["kl"] = coarse_token_kl(logits, *reference)
        return outputs

    def _hidden(
        self,
        decoder: TransformerDecoder,
        tokens: torch.Tensor,
        targets: torch.Tensor | None,
        layout: PaddingFree | None,
        inputs: dict[str, Any],
    ) -> torch.Tensor:
        """[targets, embed] what the last layer returns at the targets, without them [batch * seq, embed]."""
        if layout is None or self.way == "padded":
            return _at_targets(decoder(tokens, **inputs).flatten(0, 1), targets)
        # Not the decoder's forward, which refuses a row longer than its context.
        hidden = through_layers(decoder.layers, decoder.tok_embeddings, tokens, layout, self.way)
        # The layout has replayed rows' targets too, after all others; the reference is asked for the first ones only.
        return hidden.index_select(0, layout.targets if targets is None else layout.targets[: len(targets)])

    @torch.no_grad()
    def _reference_hidden(
        self, tokens: torch.Tensor, targets: torch.Tensor | None, layout: PaddingFree | None, inputs: dict[str, Any]
    ) -> torch.Tensor:
        """[targets, embed] the pretrained model's hidden states after the final norm, in evaluation mode."""
        reference = self.decoder if self.reference is None else self.reference
        was_training = reference.training
        reference.eval()
        with disable_adapter(reference):
            hidden = self._hidden(reference, tokens, targets, layout, inputs)
        reference.train(was_training)
        normed: torch.Tensor = reference.norm(hidden)
        return normed

    @torch.no_grad()
    def _reference_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab] from [tokens, embed]."""
        output = (self.decoder if self.reference is None else self.reference).output
        is_module = isinstance(output, nn.Module)  # a tied output layer is none, and has no adapter
        with disable_adapter(output) if is_module else nullcontext():
            logits: torch.Tensor = output(hidden)
        return logits


def _keeps_logits(num_chunks: int) -> bool:
    """Whether logits are kept for the backward: of several chunks nothing of [tokens, vocab] outlives the forward."""
    return num_chunks == 1 or not torch.is_grad_enabled()


def _at_targets(values: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
    return values if targets is None else values.index_select(0, targets)


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
