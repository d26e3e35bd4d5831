"""Gemma 2 as Google published it, on torchtune's modules.

torchtune 0.6.1's own Gemma 2 is another function of the same weights: it soft-caps the normed hidden states where Gemma 2
caps the logits, its builders give either cap the value of the other, and its conversion from Hugging Face exchanges the
norms before and after the feed-forward. The builders and the conversion here have torchtune's names and arguments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchtune.models.gemma2 import _convert_weights as torchtune_weights
from torchtune.models.gemma2 import gemma2 as torchtune_gemma2
from torchtune.modules import TiedLinear, TransformerDecoder


class SoftCappedTiedLinear(TiedLinear):
    """torchtune's tied output layer with Gemma 2's soft cap: ``cap * tanh(logits / cap)``."""

    def __init__(self, tied_module: nn.Module, cap: float) -> None:
        super().__init__(tied_module)
        self.cap = cap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [..., embed_dim]; returns logits [..., vocab]."""
        return torch.tanh(super().__call__(x) / self.cap) * self.cap


def gemma2(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-6,
    rope_base: int = 10_000,
    hidden_capping_value: float = 50.0,
    final_capping_value: float = 30.0,
    sliding_window_size: int = 4096,
    query_pre_attn_scalar: int | None = None,
) -> TransformerDecoder:
    """A Gemma 2 decoder. Arguments not listed are those of torchtune's builders.

    Args:
        num_layers: transformer blocks; those with an even index attend only within the window.
        head_dim: width of a head; need not be embed_dim / num_heads.
        max_seq_len: longest sequence in tokens.
        attn_dropout: accepted as torchtune's builder does; its Gemma 2 attention ignores it.
        hidden_capping_value: soft cap of the attention scores (``attn_logit_softcapping``).
        final_capping_value: soft cap of the logits (``final_logit_softcapping``).
        sliding_window_size: tokens that such a layer attends to, the token itself included.
        query_pre_attn_scalar: queries are divided by its root; None: ``head_dim``.
    """
    sizes = dict(locals())  # the arguments are torchtune's, but for the cap
    cap = sizes.pop("final_capping_value")
    decoder = torchtune_gemma2(**sizes)
    decoder.norm = decoder.norm.rms_norm  # without torchtune's cap of what the norm returns
    decoder.output = SoftCappedTiedLinear(decoder.tok_embeddings, cap)
    return decoder


_size = partial(gemma2, vocab_size=256_000, max_seq_len=8192)
# google/gemma-2-2b and gemma-2-2b-it, and so on
gemma2_2b = partial(
    _size, num_layers=26, num_heads=8, head_dim=256, num_kv_heads=4, embed_dim=2304, intermediate_dim=9216
)
gemma2_9b = partial(
    _size, num_layers=42, num_heads=16, head_dim=256, num_kv_heads=8, embed_dim=3584, intermediate_dim=14336
)
gemma2_27b = partial(
    _size,
    num_layers=46,
    num_heads=32,
    head_dim=128,
    num_kv_heads=16,
    embed_dim=4608,
    intermediate_dim=36864,
    query_pre_attn_scalar=144,
)


# Names from torchtune's conversion, and their names in finch's decoder. In torchtune's layer `mlp_norm` comes
# before the feed-forward and `mlp_scale` after it; its conversion has them the other way round.
_TO_TORCHTUNE = {".mlp_norm.": ".mlp_scale.", ".mlp_scale.": ".mlp_norm."}
_FROM_TORCHTUNE = {**_TO_TORCHTUNE, "norm.rms_norm.": "norm."}
_FINAL_NORM = {"norm.scale": "norm.rms_norm.scale"}


def gemma2_hf_to_tune(weights: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Any part of a Hugging Face state dict under the names of :func:`finch.models.gemma2.gemma2`.

    ``sizes``: num_heads, num_kv_heads, dim, head_dim. A name that is not Gemma 2's raises torchtune's Exception.
    """
    converted = torchtune_weights.gemma2_hf_to_tune(weights, **sizes)
    return {_renamed(name, _FROM_TORCHTUNE): tensor for name, tensor in converted.items()}


def gemma2_tune_to_hf(weights: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Converts torchtune's names and layouts back to Hugging Face's."""
    renamed = {_FINAL_NORM.get(name, _renamed(name, _TO_TORCHTUNE)): tensor for name, tensor in weights.items()}
    return torchtune_weights.gemma2_tune_to_hf(renamed, **sizes)


def _renamed(name: str, changes: dict[str, str]) -> str:
    # One change only: the two norms exchange their names, and a second one would undo the first.
    for old, new in changes.items():
        if old in name:
            return name.replace(old, new)
    return name
