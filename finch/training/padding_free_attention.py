"""Attention over a row of samples without padding: each sample attends to the shared prefix and to its own tokens.

Two ways, chosen once per run by device, dtype and model: one call per layer, or a call per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from finch.data.padding_free import PaddingFree, Varlen
from finch.models.qwen3 import Qwen3Attention
from finch.training.varlen_attention import is_supported, varlen_attention

Way = Literal["padded", "per sample", "one call"]
AttentionCall = Callable[..., torch.Tensor]
_attend: AttentionCall = F.scaled_dot_product_attention

CALLS_ATTENTION = (MultiHeadAttention.forward, Qwen3Attention.forward)
"""The forwards of attention layers that leave the scores to `_attention_call`."""
_COMPUTES_SCORES = (Gemma2Attention.forward,)

DESCRIPTIONS: dict[Way, str] = {
    "padded": "padded rows",
    "per sample": "without padding, a call per sample and layer",
    "one call": "without padding, one call per layer",
}


def choose_way(
    decoder: TransformerDecoder, device: torch.device, dtype: torch.dtype, *, padding_free: bool, compile: bool
) -> Way:
    """How attention is computed. ``dtype`` is that of the forward; ``compile``: whether the layers are compiled.

    Only torchtune's attention layers and finch's can do without padding. A call per sample is not compiled: it would be a graph per batch.
    """
    layers: list[Any] = [layer.attn for layer in decoder.layers]
    if not padding_free or not all(type(layer).forward in (*CALLS_ATTENTION, *_COMPUTES_SCORES) for layer in layers):
        return "padded"
    can_call_once = all(_can_call_once(layer, device, dtype) for layer in layers)
    if compile:
        return "one call" if can_call_once else "padded"
    return "one call" if can_call_once and device.type == "cuda" else "per sample"


def accept_padding_free(decoder: TransformerDecoder, way: Way) -> None:
    """Lets the decoder's attention layers take a :class:`PaddingFree` or its :class:`Varlen` as their ``mask``; else they do what they did."""
    for layer in (layer.attn for layer in decoder.layers):
        if way == "one call":
            layer.forward = _call_once(layer, layer.forward)
        elif type(layer).forward in CALLS_ATTENTION:
            layer._attention_call = _dispatch(layer._attention_call)
        else:
            _pad_inside(layer)


def through_layers(
    layers: Iterable[nn.Module], embed: nn.Module, tokens: torch.Tensor, layout: PaddingFree, way: Way
) -> torch.Tensor:
    """[T, embed] what the last of ``layers`` returns, T at least the layout's tokens; ``tokens``: [batch, seq], padded."""
    is_filled = way == "one call"
    mask: Any = layout.varlen if is_filled else layout
    number = None if is_filled else layout.num_tokens
    indices, positions = layout.indices[:number], layout.positions[:, :number]
    hidden = embed(tokens.flatten().index_select(0, indices)[None])
    if is_filled:
        # Else torch compiles a graph for the first batch's length alone before it takes lengths as dynamic.
        for tensor, dim in ((hidden, 1), (positions, 1), (mask.tokens, 0)):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    for layer in layers:
        hidden = layer(hidden, mask=mask, input_pos=positions)
    return hidden[0]


def padding_free_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PaddingFree, dropout_p: float = 0.0
) -> torch.Tensor:
    """[1, heads, T, head_dim] from ``q``, ``k``, ``v`` of that shape: the prefix, then each sample's own tokens; a call per sample."""
    if not layout.prefix:
        rows = zip(*(each.split(layout.lengths, dim=2) for each in (q, k, v)), strict=True)
        return torch.cat([_attend(*row, dropout_p=dropout_p, is_causal=True) for row in rows], dim=2)
    lengths = [layout.prefix, *layout.lengths]
    prefix, *samples = zip(*(each.split(lengths, dim=2) for each in (q, k, v)), strict=True)
    outputs = [_attend(*prefix, dropout_p=dropout_p, is_causal=True)]
    for own_q, own_k, own_v in samples:
        keys, values = torch.cat([prefix[1], own_k], 2), torch.cat([prefix[2], own_v], 2)
        # `is_causal` counts from the upper left corner; behind a prefix the diagonal ends in the lower right one.
        mask = layout.causal_mask[: own_q.shape[2], : keys.shape[2]]
        outputs.append(_attend(own_q, keys, values, mask, dropout_p=dropout_p))
    return torch.cat(outputs, dim=2)


def _can_call_once(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    if type(layer).forward not in CALLS_ATTENTION or not isinstance(layer, MultiHeadAttention) or layer.attn_dropout:
        return False
    # Of torchtune's releases some apply a norm of queries before the rotary embedding, some after.
    is_known = isinstance(layer, Qwen3Attention) or layer.q_norm is None
    return is_known and is_supported(device, dtype, layer.head_dim)


def _call_once(layer: MultiHeadAttention, padded: AttentionCall) -> AttentionCall:
    def forward(
        x: torch.Tensor, y: torch.Tensor | None = None, *, mask: Any = None, input_pos: Any = None
    ) -> torch.Tensor:
        if not isinstance(mask, Varlen):
            return padded(x, y, mask=mask, input_pos=input_pos)
        # [1, T, heads, head_dim]; tensor parallelism may have cut the projections
        q, k, v = (
            project(x).unflatten(-1, (-1, layer.head_dim)) for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if layer.q_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if layer.pos_embeddings is not None:
            q, k = (layer.pos_embeddings(each, input_pos=input_pos) for each in (q, k))
        # views without a gradient of their own: that of `q[0]` fills a tensor with zeros first
        output = varlen_attention(q.squeeze(0), k.squeeze(0), v.squeeze(0), mask)
        return layer.output_proj(output.flatten(-2)[None])

    return forward


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
        # A sample starts at position 0 and is padded at its end: the layer's causal mask alone hides the padding.
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
