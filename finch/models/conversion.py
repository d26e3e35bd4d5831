"""Between Hugging Face's and torchtune's names and layouts of weights, by the model_type of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf

from finch.errors import UserError
from finch.models.qwen3.weights import qwen3_hf_to_tune, qwen3_tune_to_hf

StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Conversion:
    """How one family's weights are renamed. Both functions take any part of a state dict, so that it can be streamed.

    Attributes:
        to_tune: (state dict, config.json) from Hugging Face's format to torchtune's.
        to_hugging_face: the way back.
    """

    to_tune: Callable[[StateDict, dict[str, Any]], StateDict]
    to_hugging_face: Callable[[StateDict, dict[str, Any]], StateDict]


def _llama_sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "dim": config["hidden_size"],
        "head_dim": config.get("head_dim"),
    }


_LLAMA = Conversion(
    to_tune=lambda weights, config: hf_to_tune(weights, **_llama_sizes(config)),
    to_hugging_face=lambda weights, config: tune_to_hf(weights, **_llama_sizes(config)),
)

_QWEN3 = Conversion(
    to_tune=lambda weights, _: qwen3_hf_to_tune(weights),
    to_hugging_face=lambda weights, _: qwen3_tune_to_hf(weights),
)

CONVERSIONS: dict[str, Conversion] = {"llama": _LLAMA, "mistral": _LLAMA, "qwen3": _QWEN3}


def conversion_for(config: dict[str, Any], folder: str) -> Conversion:
    """
    Args:
        config: the content of a folder's config.json.
        folder: its path, for messages.

    Raises:
        UserError: a family finch has no conversion for.
    """
    model_type = config.get("model_type")
    if model_type not in CONVERSIONS:
        raise UserError(
            f"checkpointer.checkpoint_dir={folder} holds a model of type {model_type!r}, which finch cannot convert; it knows {', '.join(CONVERSIONS)}"
        )
    return CONVERSIONS[model_type]
