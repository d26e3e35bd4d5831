"""Phi-4 with its own rotary embedding; torchtune 0.6.1's builder leaves the base at Phi-3's 10000."""

from __future__ import annotations

from torchtune.models.phi3 import phi3
from torchtune.modules import TransformerDecoder


def phi4_14b(max_seq_len: int = 16384, rope_base: int = 250_000) -> TransformerDecoder:
    """The decoder of microsoft/phi-4."""
    return phi3(
        vocab_size=100_352,
        num_layers=40,
        num_heads=40,
        num_kv_heads=10,
        embed_dim=5120,
        intermediate_dim=17920,
        max_seq_len=max_seq_len,
        norm_eps=1e-5,
        rope_base=rope_base,
    )
