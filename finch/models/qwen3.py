"""Qwen3's dense models for torchtune 0.6.1, under the names that torchtune's main branch uses, so that a config moves over.

Base and instruct models differ only in their context length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torchtune.models.convert_weights import get_mapped_key
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import DoRALinear, LoRALinear

from finch.base.errors import UserError
from finch.models.chat_tokenizer import qwen3_tokenizer as qwen3_tokenizer
from finch.models.lora import check_attention_modules

BASE_CONTEXT = 32768
INSTRUCT_CONTEXT = 40960

_MLP = ("w1", "w2", "w3")

MakeLinear = Callable[[str, int, int], nn.Module]
"""(its name in torchtune's layer, input features, output features) to a linear layer without bias."""


class Qwen3Attention(MultiHeadAttention):
    """torchtune's attention with the two steps in Qwen3's order.

    torchtune 0.6.1 applies ``q_norm`` and ``k_norm`` after the rotary embedding. The RMS norm has a learned scale per
    dimension, so that the two do not commute. Takes the same arguments and has the same parameters.
    """

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """torchtune's forward, with ``x`` and ``y`` [batch, seq, embed]; only generation from a full cache would leave ``y`` out."""
        if y is None:
            raise ValueError("Qwen3Attention needs y: pass x for self-attention")
        batch, seq, _ = x.shape
        # [batch, seq, heads, head_dim]; the counts are read off the projections, which tensor parallelism may have cut
        q = self.q_proj(x).view(batch, seq, -1, self.head_dim)
        k = self.k_proj(y).view(batch, y.shape[1], -1, self.head_dim)
        v = self.v_proj(y).view(batch, y.shape[1], -1, self.head_dim)
        q = self.pos_embeddings(self.q_norm(q), input_pos=input_pos).transpose(1, 2)
        k = self.pos_embeddings(self.k_norm(k), input_pos=input_pos).transpose(1, 2)
        v = v.transpose(1, 2)
        if self.kv_cache is not None and self.cache_enabled:
            k, v = self.kv_cache.update(k, v)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = self._attention_call(
            q,
            k,
            v,
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.kv_cache is None and mask is None and self.is_causal,
        )
        return self.output_proj(out.transpose(1, 2).reshape(batch, seq, -1))


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
    """A Qwen3 decoder on torchtune's modules. Arguments not listed are those of torchtune's builders.

    Args:
        head_dim: width of a head; 128 in all of Qwen3, not always embed_dim / num_heads.
        max_seq_len: longest sequence in tokens.
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
        lora_rank, lora_alpha: columns of B, rows of A; B A is multiplied by lora_alpha / lora_rank.
        lora_dropout: share of A's inputs set to 0 in training.
        use_dora: weights are split into magnitude and direction ("DoRA", Liu et al., 2024).
        quantize_base: must be False; torchtune's name for QLoRA.

    Raises UserError for arguments that name no layer, or exclude each other.
    """
    given = dict(locals())  # of which those of qwen3 are passed on
    check_attention_modules(lora_attn_modules)
    if quantize_base:
        raise UserError("model.quantize_base=True (QLoRA) is not supported for Qwen3; set it to False")
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

    sizes = {name: given[name] for name in inspect.signature(qwen3).parameters if name != "linear"}
    return qwen3(**sizes, linear=linear)


_size: Callable[..., dict[str, Any]] = partial(dict, vocab_size=151936, num_kv_heads=8, head_dim=128)
SIZE_0_6B = _size(num_layers=28, num_heads=16, embed_dim=1024, intermediate_dim=3072, tie_word_embeddings=True)
SIZE_1_7B = _size(num_layers=28, num_heads=16, embed_dim=2048, intermediate_dim=6144, tie_word_embeddings=True)
SIZE_4B = _size(num_layers=36, num_heads=32, embed_dim=2560, intermediate_dim=9728, tie_word_embeddings=True)
SIZE_8B = _size(num_layers=36, num_heads=32, embed_dim=4096, intermediate_dim=12288, tie_word_embeddings=False)


_lora_qwen3 = partial(lora_qwen3, lora_rank=8, lora_alpha=16)  # torchtune's defaults

# Later releases of a size differ in max_seq_len and rope_base: Qwen3-4B-Instruct-2507 has 5e6.
qwen3_0_6b_base = partial(qwen3, **SIZE_0_6B, max_seq_len=BASE_CONTEXT)  # Qwen/Qwen3-0.6B-Base
qwen3_0_6b_instruct = partial(qwen3, **SIZE_0_6B, max_seq_len=INSTRUCT_CONTEXT)  # Qwen/Qwen3-0.6B, and so on
qwen3_1_7b_base = partial(qwen3, **SIZE_1_7B, max_seq_len=BASE_CONTEXT)
qwen3_1_7b_instruct = partial(qwen3, **SIZE_1_7B, max_seq_len=INSTRUCT_CONTEXT)
qwen3_4b_base = partial(qwen3, **SIZE_4B, max_seq_len=BASE_CONTEXT)
qwen3_4b_instruct = partial(qwen3, **SIZE_4B, max_seq_len=INSTRUCT_CONTEXT)
qwen3_8b_base = partial(qwen3, **SIZE_8B, max_seq_len=BASE_CONTEXT)
qwen3_8b_instruct = partial(qwen3, **SIZE_8B, max_seq_len=INSTRUCT_CONTEXT)

lora_qwen3_0_6b_base = partial(_lora_qwen3, **SIZE_0_6B, max_seq_len=BASE_CONTEXT)
lora_qwen3_0_6b_instruct = partial(_lora_qwen3, **SIZE_0_6B, max_seq_len=INSTRUCT_CONTEXT)
lora_qwen3_1_7b_base = partial(_lora_qwen3, **SIZE_1_7B, max_seq_len=BASE_CONTEXT)
lora_qwen3_1_7b_instruct = partial(_lora_qwen3, **SIZE_1_7B, max_seq_len=INSTRUCT_CONTEXT)
lora_qwen3_4b_base = partial(_lora_qwen3, **SIZE_4B, max_seq_len=BASE_CONTEXT)
lora_qwen3_4b_instruct = partial(_lora_qwen3, **SIZE_4B, max_seq_len=INSTRUCT_CONTEXT)
lora_qwen3_8b_base = partial(_lora_qwen3, **SIZE_8B, max_seq_len=BASE_CONTEXT)
lora_qwen3_8b_instruct = partial(_lora_qwen3, **SIZE_8B, max_seq_len=INSTRUCT_CONTEXT)


def qwen3_tp_plan() -> dict[str, ParallelStyle]:
    """Qwen3's ``tensor_parallel_plan``: heads and hidden units of the MLP are sharded, activations between layers are replicated.

    ``q_norm`` and ``k_norm`` normalise each head separately with one scale for all heads: they work on this rank's heads
    (dimension 2 of [batch, seq, heads, head_dim]), and the scale's gradient is summed over the ranks.
    """
    per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
        **{f"layers.*.attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        **{f"layers.*.attn.{name}": per_head for name in ("q_norm", "k_norm")},
        **{f"layers.*.{name}": RowwiseParallel() for name in ("attn.output_proj", "mlp.w2")},
        **{f"layers.*.mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
    }


StateDict = dict[str, torch.Tensor]

_LAYER = {
    **{f"self_attn.{each}_proj.weight": f"attn.{each}_proj.weight" for each in "qkv"},
    "self_attn.o_proj.weight": "attn.output_proj.weight",
    **{f"self_attn.{each}_norm.weight": f"attn.{each}_norm.scale" for each in "qk"},
    "mlp.gate_proj.weight": "mlp.w1.weight",
    "mlp.down_proj.weight": "mlp.w2.weight",
    "mlp.up_proj.weight": "mlp.w3.weight",
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}
_TO_TORCHTUNE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
    **{f"model.layers.{{}}.{hf}": f"layers.{{}}.{tune}" for hf, tune in _LAYER.items()},
}
_TO_HUGGING_FACE = {tune: hf for hf, tune in _TO_TORCHTUNE.items()}


def qwen3_hf_to_tune(state_dict: StateDict) -> StateDict:
    """Renames any part of a Hugging Face state dict of Qwen3. Only names change: both rotate halves of a head."""
    return {get_mapped_key(name, _TO_TORCHTUNE): tensor for name, tensor in state_dict.items()}


def qwen3_tune_to_hf(state_dict: StateDict) -> StateDict:
    """Renames any part of a torchtune state dict of Qwen3."""
    return {get_mapped_key(name, _TO_HUGGING_FACE): tensor for name, tensor in state_dict.items()}
