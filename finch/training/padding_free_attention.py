"""Attention over a row of samples without padding: each sample attends to the shared prefix and to its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from finch.data.padding_free import PaddingFree
from finch.models.qwen3 import Qwen3Attention
from finch.torchtune_names import Gemma2Attention

AttentionCall = Callable[..., torch.Tensor]
_attend: AttentionCall = F.scaled_dot_product_attention

_CALLS_ATTENTION = (MultiHeadAttention.forward, Qwen3Attention.forward)  # these leave the scores to `_attention_call`
_COMPUTES_SCORES = (Gemma2Attention.forward,)


def accept_padding_free(decoder: TransformerDecoder) -> bool:
    """Lets the decoder's attention layers take a :class:`PaddingFree` as their ``mask``; with any other mask they do what they did.

    Returns whether all could: only torchtune's attention layers and finch's are known.
    """
    layers = [layer.attn for layer in decoder.layers]
    if not all(type(layer).forward in (*_CALLS_ATTENTION, *_COMPUTES_SCORES) for layer in layers):
        return False
    for layer in layers:
        if type(layer).forward in _CALLS_ATTENTION:
            layer._attention_call = _dispatch(layer._attention_call)
        else:
            _pad_inside(layer)
    return True


def padding_free_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PaddingFree, dropout_p: float = 0.0
) -> torch.Tensor:
    """[1, heads, T, head_dim] from ``q``, ``k``, ``v`` of that shape: the prefix, then each sample's own tokens."""
    if not layout.prefix:
        rows = zip(*(each.split(layout.lengths, dim=2) for each in (q, k, v)), strict=True)
        return torch.cat([_attend(*row, dropout_p=dropout_p, is_causal=True) for row in rows], dim=2)
    lengths = [layout.prefix, *layout.lengths]
    prefix, *samples = zip(*(each.split(lengths, dim=2) for each in (q, k, v)), strict=True)
    outputs = [_attend(*prefix, dropout_p=dropout_p, is_causal=True)]
    for own_q, own_k, own_v in samples:
        keys, values = torch.cat([prefix[1], own_k], 2), torch.cat([prefix[2], own_v], 2)
        mask = layout.causal_mask[: own_q.shape[2], : keys.shape[2]]
        outputs.append(_attend(own_q, keys, values, mask, dropout_p=dropout_p))
    return torch.cat(outputs, dim=2)


def _pad_inside(layer: nn.Module) -> None:
    """Lets an attention layer that computes its scores itself see a padded batch: the rest of the model still has none."""
    places: list[torch.Tensor] = []  # of the forward pass that is running

    def pad(_: nn.Module, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
        places.clear()  # a forward pass that failed has left its own
        layout = options.get("mask")
        if not isinstance(layout, PaddingFree):
            return inputs, options
        rows, place = layout.padded
        places.append(place)
        padded = inputs[0][0][rows]  # [samples, seq, embed]
        return (padded, padded), {**options, "mask": None, "input_pos": None}

    def unpad(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.flatten(0, 1)[places.pop()][None] if places else output

    layer.register_forward_pre_hook(pad, with_kwargs=True)
    layer.register_forward_hook(unpad)


def _dispatch(padded: AttentionCall) -> AttentionCall:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Any, **options: Any) -> torch.Tensor:
        if isinstance(mask, PaddingFree):
            return padding_free_attention(q, k, v, mask, options["dropout_p"])
        return padded(q, k, v, mask=mask, **options)

    return attention
