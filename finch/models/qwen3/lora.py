"""Builders of Qwen3's dense models with LoRA layers; everything else is :mod:`finch.models.qwen3.builders`'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import DoRALinear, LoRALinear

from finch.errors import UserError
from finch.models.lora import check_attention_modules
from finch.models.qwen3.builders import BASE_CONTEXT, INSTRUCT_CONTEXT, SIZE_0_6B, SIZE_1_7B, SIZE_4B, SIZE_8B, qwen3

_MLP = ("w1", "w2", "w3")


def lora_qwen3(
    lora_attn_modules: Sequence[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
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
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """A Qwen3 decoder some of whose linear layers are torchtune's LoRALinear or DoRALinear.

    The pretrained weights have the names they have in :func:`finch.models.qwen3.qwen3`. Arguments not listed are its.

    Args:
        lora_attn_modules: of ``q_proj``, ``k_proj``, ``v_proj``, ``output_proj``; may be empty.
        apply_lora_to_mlp: whether ``w1``, ``w2`` and ``w3`` have it.
        apply_lora_to_output: whether the output layer has it; not where it is the embedding.
        lora_rank: columns of B, rows of A.
        lora_alpha: B A is multiplied by lora_alpha / lora_rank.
        lora_dropout: share of A's inputs set to 0 in training.
        use_dora: weights are split into magnitude and direction ("DoRA", Liu et al., 2024).
        quantize_base: must be False; torchtune's name for QLoRA.

    Raises:
        UserError: arguments that name no layer, or exclude each other.
    """
    check_attention_modules(lora_attn_modules)
    if quantize_base:
        raise UserError("model.quantize_base=True (QLoRA) is not taken for Qwen3; set it to False")
    if apply_lora_to_output and tie_word_embeddings:
        raise UserError(
            "model.apply_lora_to_output=True is not possible where the output layer is the embedding (tie_word_embeddings); set it to False"
        )
    adapted = {*lora_attn_modules, *(_MLP if apply_lora_to_mlp else ()), *(("output",) if apply_lora_to_output else ())}
    layer = DoRALinear if use_dora else LoRALinear

    def linear(name: str, in_dim: int, out_dim: int) -> nn.Module:
        if name in adapted:
            return layer(in_dim, out_dim, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout)
        return nn.Linear(in_dim, out_dim, bias=False)

    return qwen3(
        linear=linear,
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        rope_base=rope_base,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
    )


def _builder(size: dict[str, Any], max_seq_len: int) -> Callable[..., TransformerDecoder]:
    """:func:`lora_qwen3` of one size, with torchtune's defaults of rank and alpha."""
    return partial(lora_qwen3, **size, max_seq_len=max_seq_len, lora_rank=8, lora_alpha=16)


lora_qwen3_0_6b_base = _builder(SIZE_0_6B, BASE_CONTEXT)  # Qwen/Qwen3-0.6B-Base
lora_qwen3_0_6b_instruct = _builder(SIZE_0_6B, INSTRUCT_CONTEXT)  # Qwen/Qwen3-0.6B, and so on
lora_qwen3_1_7b_base = _builder(SIZE_1_7B, BASE_CONTEXT)
lora_qwen3_1_7b_instruct = _builder(SIZE_1_7B, INSTRUCT_CONTEXT)
lora_qwen3_4b_base = _builder(SIZE_4B, BASE_CONTEXT)
lora_qwen3_4b_instruct = _builder(SIZE_4B, INSTRUCT_CONTEXT)
lora_qwen3_8b_base = _builder(SIZE_8B, BASE_CONTEXT)
lora_qwen3_8b_instruct = _builder(SIZE_8B, INSTRUCT_CONTEXT)
