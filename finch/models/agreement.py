"""Whether a torchtune model is the one a Hugging Face config.json describes, as far as shapes do not show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import TransformerDecoder

from finch.errors import UserError

# config.json's model_type, and the folders of builders that make such a model.
FAMILIES = {
    "llama": ("llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "code_llama2"),
    "mistral": ("mistral",),
    "qwen3": ("qwen3",),
}
# Llama 3.1's stretching of the rotary embedding: its keys in config.json and in torchtune.
_SCALING = {
    "factor": "scale_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "old_context_len",
}


def check_agreement(decoder: TransformerDecoder, component: str, config: dict[str, Any], folder: str) -> None:
    """Compares architecture, heads, norms and rotary embedding; weights that fit would otherwise be misread in silence.

    Args:
        decoder: as built, on any device.
        component: the dotted path of its builder.
        config: the folder's config.json.

    Raises:
        UserError: names the first difference.
    """
    parts = component.split(".")
    family = parts[2] if parts[:2] in (["torchtune", "models"], ["finch", "models"]) and len(parts) > 3 else None
    expected = FAMILIES.get(str(config.get("model_type")))
    if family is not None and expected is not None and family not in expected:
        raise UserError(
            f"model._component_={component} builds a {family} model, but checkpointer.checkpoint_dir={folder} holds a {config['model_type']} "
            f"model ({', '.join(config.get('architectures') or [])}); give a builder of {' or '.join(expected)}"
        )
    kind = _rope_settings(config)["rope_type"]
    if kind not in ("default", "llama3"):
        raise UserError(
            f"config.json of checkpointer.checkpoint_dir={folder} asks for rope scaling {kind!r}, which torchtune's models do not have; "
            "give a checkpoint without it, or remove it for sequences within the original context"
        )
    for name, built, stored in _settings(decoder, config):
        if stored is not None and built != stored:
            raise UserError(
                f"model._component_={component} has {name} {_shown(built)}, config.json of checkpointer.checkpoint_dir={folder} says {_shown(stored)}; "
                "give the builder and the settings of this checkpoint"
            )


def _settings(decoder: TransformerDecoder, config: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """(what, in the model, in config.json); None where config.json is silent."""
    attention = decoder.layers[0].attn
    heads = config.get("num_attention_heads")
    yield "number of attention heads", attention.num_heads, heads
    yield "number of key-value heads", attention.num_kv_heads, config.get("num_key_value_heads", heads)
    yield "head dimension", attention.head_dim, config.get("head_dim")
    yield "norm epsilon", decoder.norm.eps, config.get("rms_norm_eps")
    rope = attention.pos_embeddings
    settings = _rope_settings(config)
    yield "rope base", rope.base, settings.get("rope_theta")
    kind = settings["rope_type"]
    yield "Llama 3.1's rope scaling (1: on)", float(isinstance(rope, Llama3ScaledRoPE)), float(kind == "llama3")
    if kind == "llama3":
        for theirs, ours in _SCALING.items():
            yield f"rope scaling {theirs}", getattr(rope, ours), settings.get(theirs)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding's settings; transformers 5 keeps them under one key, older files under two."""
    settings = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    kind = settings.get("rope_type") or settings.get("type") or "default"
    # Old Llama folders are silent about the base, which then is transformers' default.
    base = settings.get("rope_theta") or (10000.0 if config.get("model_type") in ("llama", "mistral") else None)
    return {**settings, "rope_type": kind, "rope_theta": base}
