"""Compares a torchtune model with a pretrained folder's config, in the settings that tensor shapes do not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
from torchtune.modules import TiedLinear, TransformerDecoder

from finch.errors import UserError
from finch.log import logger
from finch.models.family_table import FAMILIES
from finch.models.hf_config import is_tied, rope_settings
from finch.torchtune_names import Gemma2Attention

# Families whose builders in torchtune 0.6.1 differ from the published models; finch has builders of the same names.
_REBUILT = ("gemma2", "phi4")
# Llama 3.1's rope scaling: the keys of config.json, and the attributes of torchtune's module.
_ROPE_SCALING = {
    "factor": "scale_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "old_context_len",
}


def validate_against_hf_config(
    decoder: TransformerDecoder, component: str, config: dict[str, Any], folder: str, file: str = "config.json"
) -> None:
    """Compares family, heads, norms and rotary embedding: weights of the right shapes could otherwise be silently misused.

    A sliding attention window that the model lacks is a warning only: rows within the window give the same losses.

    Args:
        decoder: as built, on any device.
        component: the dotted path of its builder.
        config: the content of the folder's config.json; keys that are missing are not compared.
        folder: its path, for messages.
        file: name of the file that ``config`` comes from, for messages.

    Raises:
        UserError: the builder is of another family, or a setting differs; names the first.
    """
    parts = component.split(".")
    family = parts[2] if parts[:2] in (["torchtune", "models"], ["finch", "models"]) and len(parts) > 3 else None
    known = FAMILIES.get(str(config.get("model_type")))
    if family is not None and known is not None and family not in known.packages:
        raise UserError(
            f"model._component_={component} builds a {family} model, but checkpointer.checkpoint_dir={folder} holds a {config['model_type']} "
            f"model ({', '.join(config.get('architectures') or [])}); give a builder of {' or '.join(known.packages)}"
        )
    rope_type = rope_settings(config)["rope_type"]
    if rope_type not in ("default", "llama3"):
        raise UserError(
            f"{file} of checkpointer.checkpoint_dir={folder} has rope scaling {rope_type!r}, which torchtune's models lack; "
            "give a checkpoint without it, or remove it for sequences within the original context"
        )
    remedy = "give the builder and the settings of this checkpoint"
    if parts[0] == "torchtune" and family in _REBUILT:
        remedy = f"give finch.models.{family}.{parts[-1]}, which is correct"
        if "lora" in parts[-1]:
            remedy = f"finch has no LoRA builder for it, fine-tune it in full with finch.models.{family}"
    if isinstance(decoder.norm, Gemma2FinalNorm):
        raise UserError(
            f"model._component_={component} caps hidden states where the Gemma 2 of checkpointer.checkpoint_dir={folder} caps logits; {remedy}"
        )
    for name, built, stored in _settings(decoder, config):
        if stored is not None and not _is_same(built, stored):
            raise UserError(
                f"model._component_={component} has {name} {_format(built)}, {file} of checkpointer.checkpoint_dir={folder} says {_format(stored)}; {remedy}"
            )
    _warn_about_sliding_window(decoder, component, config, folder)


def _warn_about_sliding_window(
    decoder: TransformerDecoder, component: str, config: dict[str, Any], folder: str
) -> None:
    uses_window = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    window = config.get("sliding_window") if uses_window else None
    if window and decoder.max_seq_len > window and not isinstance(decoder.layers[0].attn, Gemma2Attention):
        logger.warning(
            f"config.json of {folder} limits attention to the last {window} tokens, {component} does not: longer rows are trained "
            f"with more context than the checkpoint uses; tokenizer.max_seq_len={window} avoids it"
        )


def _settings(decoder: TransformerDecoder, config: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """(setting, the model's value, config.json's value or None where it has none)."""
    attention = decoder.layers[0].attn
    heads = config.get("num_attention_heads")
    yield "number of attention heads", attention.num_heads, heads
    yield "number of key-value heads", attention.num_kv_heads, config.get("num_key_value_heads", heads)
    yield "head dimension", attention.head_dim, config.get("head_dim")
    yield "norm epsilon", decoder.norm.eps, config.get("rms_norm_eps")
    if "model_type" in config:
        tied = isinstance(decoder.output, TiedLinear)
        yield "tied embeddings (1: the output layer is the embedding)", float(tied), float(is_tied(config))
    rope = attention.pos_embeddings
    settings = rope_settings(config)
    yield "rope base", rope.base, settings.get("rope_theta")
    yield "rotated fraction of each head", 1.0, settings["partial_rotary_factor"]
    is_scaled = settings["rope_type"] == "llama3" and settings.get("factor") != 1
    # Scaled by 1 is not scaled: so Llama 3.2's builder makes a tied Llama without rope scaling.
    yield "Llama 3.1's rope scaling (1: on)", float(getattr(rope, "scale_factor", 1) != 1), float(is_scaled)
    if is_scaled:
        for key, attribute in _ROPE_SCALING.items():
            yield f"rope scaling {key}", getattr(rope, attribute), settings.get(key)
    if isinstance(attention, Gemma2Attention):
        yield from _gemma2_settings(decoder, attention, config)


def _gemma2_settings(
    decoder: TransformerDecoder, attention: Gemma2Attention, config: dict[str, Any]
) -> Iterator[tuple[str, float, float | None]]:
    """To transformers null means none, and a missing key means the value that Gemma 2 was published with."""
    for key, built, default in (
        ("attn_logit_softcapping", attention.softcapping, 50.0),
        ("final_logit_softcapping", getattr(decoder.output, "cap", None), 30.0),
        ("sliding_window", attention.sliding_window_size, 4096),
    ):
        yield f"{key} (0: none)", built or 0, config.get(key, default) or 0
    yield "query scale", attention.scaling, config.get("query_pre_attn_scalar", 256) ** -0.5


def _is_same(built: float, stored: float) -> bool:
    """Compared in fp32: a config.json made from GGUF has the epsilon 1e-5 as 9.999999747378752e-06."""
    if not isinstance(stored, (int, float)):
        return built == stored
    first, second = torch.tensor([built, stored], dtype=torch.float32, device="cpu").tolist()
    return first == second


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
