"""A Llama between stories260k and SmolLM2 in size, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 512,  # stories260k's tokenizer
    "hidden_size": 384,
    "intermediate_size": 1088,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def make_llama(folder: Path, *, max_seq_len: int) -> None:
    """Writes a Hugging Face folder of 14 M random parameters, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=max_seq_len, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
