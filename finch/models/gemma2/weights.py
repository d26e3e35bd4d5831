"""Gemma 2's weights between Hugging Face's format and torchtune's."""

from __future__ import annotations

from typing import Any

import torch
from torchtune.models.gemma2 import _convert_weights as torchtune_weights

# Names from torchtune's conversion, and their names in finch's decoder. In torchtune's layer `mlp_norm` comes
# before the feed-forward and `mlp_scale` after it; its conversion has them the other way round.
_FROM_TORCHTUNE = {".mlp_norm.": ".mlp_scale.", ".mlp_scale.": ".mlp_norm.", "norm.rms_norm.": "norm."}
_TO_TORCHTUNE = {".mlp_norm.": ".mlp_scale.", ".mlp_scale.": ".mlp_norm."}
_FINAL_NORM = {"norm.scale": "norm.rms_norm.scale"}


def gemma2_hf_to_tune(weights: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Any part of a Hugging Face state dict under the names of :func:`finch.models.gemma2.gemma2`.

    Args:
        weights: Hugging Face's names and tensors.
        sizes: num_heads, num_kv_heads, dim, head_dim.

    Raises:
        Exception: torchtune's, for a name that is not Gemma 2's.
    """
    converted = torchtune_weights.gemma2_hf_to_tune(weights, **sizes)
    return {_renamed(name, _FROM_TORCHTUNE): tensor for name, tensor in converted.items()}


def gemma2_tune_to_hf(weights: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Converts torchtune's names and layouts back to Hugging Face's."""
    renamed = {_FINAL_NORM.get(name, _renamed(name, _TO_TORCHTUNE)): tensor for name, tensor in weights.items()}
    return torchtune_weights.gemma2_tune_to_hf(renamed, **sizes)


def _renamed(name: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        if old in name:
            return name.replace(old, new)
    return name
