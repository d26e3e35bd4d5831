"""Builders of Qwen3's dense models. Base and instruct models differ in their context length alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import FeedForward, RMSNorm, TiedLinear, TransformerDecoder, TransformerSelfAttentionLayer

from finch.models.qwen3.attention import Qwen3Attention

BASE_CONTEXT = 32768
INSTRUCT_CONTEXT = 40960

MakeLinear = Callable[[str, int, int], nn.Module]
"""(its name in torchtune's layer, input features, output features) to a linear layer without bias."""


def _plain_linear(_: str, in_dim: int, out_dim: int) -> nn.Module:
    return nn.Linear(in_dim, out_dim, bias=False)


def qwen3(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int,
    max_seq_len: int,
    rope_base: float = 1e6,
    norm_eps: float = 1e-6,
    tie_word_embeddings: bool = False,
    linear: MakeLinear = _plain_linear,
) -> TransformerDecoder:
    """A Qwen3 decoder on torchtune's modules.

    Args:
        vocab_size: rows of the embedding.
        num_layers: transformer blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        embed_dim: width of the residual stream.
        intermediate_dim: width of the feed-forward.
        head_dim: width of a head; 128 in all of Qwen3, not always embed_dim / num_heads.
        max_seq_len: longest sequence in tokens.
        rope_base: base period of the rotary embedding.
        norm_eps: epsilon of the RMS norms.
        tie_word_embeddings: whether the output layer is the embedding (0.6B, 1.7B, 4B).
        linear: for :func:`finch.models.qwen3.lora_qwen3`; makes ``q_proj``, ``k_proj``, ``v_proj``, ``output_proj``, ``w1``,
            ``w2``, ``w3`` of each layer, and ``output`` unless embeddings are tied.
    """
    rope = Qwen2RotaryPositionalEmbeddings(dim=head_dim, max_seq_len=max_seq_len, base=rope_base)
    layers = [
        TransformerSelfAttentionLayer(
            attn=Qwen3Attention(
                embed_dim=embed_dim,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                q_proj=linear("q_proj", embed_dim, num_heads * head_dim),
                k_proj=linear("k_proj", embed_dim, num_kv_heads * head_dim),
                v_proj=linear("v_proj", embed_dim, num_kv_heads * head_dim),
                output_proj=linear("output_proj", num_heads * head_dim, embed_dim),
                pos_embeddings=rope,
                q_norm=RMSNorm(head_dim, eps=norm_eps),
                k_norm=RMSNorm(head_dim, eps=norm_eps),
                max_seq_len=max_seq_len,
            ),
            mlp=FeedForward(
                gate_proj=linear("w1", embed_dim, intermediate_dim),
                down_proj=linear("w2", intermediate_dim, embed_dim),
                up_proj=linear("w3", embed_dim, intermediate_dim),
            ),
            sa_norm=RMSNorm(embed_dim, eps=norm_eps),
            mlp_norm=RMSNorm(embed_dim, eps=norm_eps),
        )
        for _ in range(num_layers)
    ]
    embedding = nn.Embedding(vocab_size, embed_dim)
    return TransformerDecoder(
        tok_embeddings=embedding,
        layers=nn.ModuleList(layers),
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=RMSNorm(embed_dim, eps=norm_eps),
        output=TiedLinear(embedding) if tie_word_embeddings else linear("output", embed_dim, vocab_size),
    )


_size: Callable[..., dict[str, Any]] = partial(dict, vocab_size=151936, num_kv_heads=8, head_dim=128)
SIZE_0_6B = _size(num_layers=28, num_heads=16, embed_dim=1024, intermediate_dim=3072, tie_word_embeddings=True)
SIZE_1_7B = _size(num_layers=28, num_heads=16, embed_dim=2048, intermediate_dim=6144, tie_word_embeddings=True)
SIZE_4B = _size(num_layers=36, num_heads=32, embed_dim=2560, intermediate_dim=9728, tie_word_embeddings=True)
SIZE_8B = _size(num_layers=36, num_heads=32, embed_dim=4096, intermediate_dim=12288, tie_word_embeddings=False)


def _builder(size: dict[str, Any], max_seq_len: int) -> Callable[..., TransformerDecoder]:
    """:func:`qwen3` of one size. Later releases of a size differ in max_seq_len and rope_base: Qwen3-4B-Instruct-2507 has 5e6."""
    return partial(qwen3, **size, max_seq_len=max_seq_len)


qwen3_0_6b_base = _builder(SIZE_0_6B, BASE_CONTEXT)  # Qwen/Qwen3-0.6B-Base
qwen3_0_6b_instruct = _builder(SIZE_0_6B, INSTRUCT_CONTEXT)  # Qwen/Qwen3-0.6B, and so on
qwen3_1_7b_base = _builder(SIZE_1_7B, BASE_CONTEXT)
qwen3_1_7b_instruct = _builder(SIZE_1_7B, INSTRUCT_CONTEXT)
qwen3_4b_base = _builder(SIZE_4B, BASE_CONTEXT)
qwen3_4b_instruct = _builder(SIZE_4B, INSTRUCT_CONTEXT)
qwen3_8b_base = _builder(SIZE_8B, BASE_CONTEXT)
qwen3_8b_instruct = _builder(SIZE_8B, INSTRUCT_CONTEXT)
