"""Qwen3's weights between Hugging Face's names and torchtune's. Only names change: both rotate halves of a head."""

from __future__ import annotations

import torch
from torchtune.models.convert_weights import get_mapped_key

StateDict = dict[str, torch.Tensor]

_LAYER = {
    "self_attn.q_proj.weight": "attn.q_proj.weight",
    "self_attn.k_proj.weight": "attn.k_proj.weight",
    "self_attn.v_proj.weight": "attn.v_proj.weight",
    "self_attn.o_proj.weight": "attn.output_proj.weight",
    "self_attn.q_norm.weight": "attn.q_norm.scale",
    "self_attn.k_norm.weight": "attn.k_norm.scale",
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
    """Renames any part of a Hugging Face state dict of Qwen3."""
    return {get_mapped_key(name, _TO_TORCHTUNE): tensor for name, tensor in state_dict.items()}


def qwen3_tune_to_hf(state_dict: StateDict) -> StateDict:
    """Renames any part of a torchtune state dict of Qwen3."""
    return {get_mapped_key(name, _TO_HUGGING_FACE): tensor for name, tensor in state_dict.items()}
