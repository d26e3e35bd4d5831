"""From a folder's config.json to the builder of its family and the folder's sizes. Needs neither torch nor torchtune."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finch.base.errors import UserError
from finch.config.instantiate import component_of
from finch.models.hf_config import CONFIG, FAMILIES, check_folder, is_tied, read_config, rope_settings

SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""The builders' arguments, and config.json's keys."""
# Heads of any width; with transformers' value where the key is missing. Others have hidden_size / num_attention_heads.
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "qwen3": 128}
# Builders whose output layer is the embedding, or is not; the others take either.
_TIED = {"gemma": True, "gemma2": True, "mistral": False, "phi3": False}
# transformers reads "gelu" in Gemma's first files as its tanh approximation.
_ACTIVATION = {"gemma": ("hidden_act", ("gelu", "gelu_pytorch_tanh")), "gemma2": ("hidden_activation", ("gelu_pytorch_tanh",))}  # fmt: skip
# Switches that no builder has, and what the builders are like.
_SWITCHED_OFF = {
    **dict.fromkeys(("attention_bias", "mlp_bias"), "has no such bias"),
    "use_bidirectional_attention": "attends only to earlier tokens",
}
# The one variant of Llama 3.1's rope scaling that torchtune's builders have; they take its factor.
_ROPE_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}

# torchtune 0.6.1's builders whose models differ from the published checkpoints, and how.
_DIFFERENCES = {
    "gemma2": "caps hidden states where Gemma 2 caps logits, and exchanges the two caps",
    "phi4": "has Phi-3's base of the rotary embedding, 10000, where Phi-4 has 250000",
}
_WRONG_BUILDERS = ("gemma2.gemma2_2b", "gemma2.gemma2_9b", "gemma2.gemma2_27b", "phi4.phi4_14b")


def model_block(folder: Path, max_seq_len: int | None = None, *, option: str = "model_dir") -> dict[str, Any]:
    """The ``model:`` block of a config that builds the model of a folder: a builder of torchtune or finch, and its arguments.

    Args:
        folder: a Hugging Face folder; only its config.json is read.
        max_seq_len: longest sequence in tokens; None: the folder's max_position_embeddings.
        option: the config key that the folder was given by, for messages.

    Raises UserError if there is no such folder, config.json is missing or broken, the family is unknown, or the builder lacks a setting.
    """
    folder = check_folder(folder, option)
    config = read_config(folder, option)
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        known = ", ".join(f"{name} ({family.name})" for name, family in FAMILIES.items())
        raise UserError(
            f"{option}={folder} holds a model of type {model_type!r}, which finch has no builder for; it has {known}"
        )
    if config.get("num_key_value_heads") is None:  # old files of models without grouped heads
        config["num_key_value_heads"] = config.get("num_attention_heads")
    rope = rope_settings(config)
    for key in (*SIZES.values(), "rope_theta", *(("factor",) if rope["rope_type"] == "llama3" else ())):
        value = config.get(key) if key in SIZES.values() else rope.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UserError(f"{CONFIG} of {option}={folder} has {key}={value}, not a number above 0; download it again")
    for key, value, reason in _unsupported(config):
        raise UserError(
            f"{CONFIG} of {option}={folder} has {key}={value}, but {reason}; finch cannot train this model, give another"
        )
    block = {"_component_": FAMILIES[model_type].builders[0], **{name: config[key] for name, key in SIZES.items()}}
    block |= {"rope_base": _plain(rope["rope_theta"]), **_family_arguments(config)}
    return block if max_seq_len is None else {**block, "max_seq_len": max_seq_len}


def _unsupported(config: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what finch's builder has instead) of the settings that the builder of the family cannot express."""
    model_type, rope = config["model_type"], rope_settings(config)
    name = f"the builder of {FAMILIES[model_type].name}"
    key, activations = _ACTIVATION.get(model_type, ("hidden_act", ("silu",)))
    if (config.get(key) or activations[-1]) not in activations:
        yield key, config[key], f"{name} has {activations[-1]}"
    for key, difference in _SWITCHED_OFF.items():
        if config.get(key):
            yield key, config[key], f"{name} {difference}"
    if config.get("quantization_config"):
        yield "quantization_config", "...", "finch trains weights that are not quantized"
    head_dim = config["hidden_size"] / config["num_attention_heads"]
    if model_type not in _HEAD_DIM and (config.get("head_dim") or head_dim) != head_dim:
        yield "head_dim", config["head_dim"], f"{name} has hidden_size / num_attention_heads = {head_dim:g}"
    if model_type in _TIED and is_tied(config) != _TIED[model_type]:
        yield "tie_word_embeddings", is_tied(config), f"{name} has tie_word_embeddings={_TIED[model_type]}"
    if rope["partial_rotary_factor"] not in (None, 1):
        yield "partial_rotary_factor", rope["partial_rotary_factor"], f"{name} rotates complete heads"
    if rope["rope_type"] not in (("default", "llama3") if model_type == "llama" else ("default",)):
        yield "rope_type", rope["rope_type"], f"{name} has no such rope scaling"
    if rope["rope_type"] == "llama3":
        for key, value in _ROPE_SCALING.items():
            if rope.get(key, value) != value:
                yield f"rope scaling's {key}", rope[key], f"{name} has {value}"
    if model_type == "gemma2":
        for index, kind in enumerate(config.get("layer_types") or ()):
            if kind != ("full_attention" if index % 2 else "sliding_attention"):
                yield f"layer_types[{index}]", kind, f"in {name} only layers 0, 2, 4, ... have a sliding window"
                return
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
            # To transformers null means none, and a missing key its default, which the builder has.
            if key in config and not config[key]:
                yield key, config[key], f"{name} always has one"


def _family_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments that not all builders have, and the builder where the family has several."""
    model_type = config["model_type"]
    arguments: dict[str, Any] = {}
    if model_type in _HEAD_DIM:
        arguments["head_dim"] = config.get("head_dim") or _HEAD_DIM[model_type]
    if model_type in ("qwen2", "qwen3"):
        arguments["tie_word_embeddings"] = is_tied(config)
    if model_type == "llama":
        plain, scaled, tied = FAMILIES["llama"].builders
        rope = rope_settings(config)
        factor = rope["factor"] if rope["rope_type"] == "llama3" else 1
        # Scaled by 1 is not scaled; torchtune has no other builder with tied embeddings.
        if is_tied(config) or factor != 1:
            arguments |= {"_component_": tied if is_tied(config) else scaled, "scale_factor": _plain(factor)}
        else:
            arguments["_component_"] = plain
    if model_type == "gemma2":  # as transformers, where a key is missing
        arguments |= {
            "hidden_capping_value": config.get("attn_logit_softcapping", 50.0),
            "final_capping_value": config.get("final_logit_softcapping", 30.0),
            "sliding_window_size": config.get("sliding_window", 4096),
            "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256),
        }
    return arguments


def _plain(number: float) -> float:
    """A whole number as an int: 10000 instead of 10000.0, as torchtune's configs have it."""
    return int(number) if number == int(number) else number


def replace_known_bad_builder(model: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """The ``model`` block to build, and a log message where finch's builder takes the place of torchtune's, else None.

    So a torchtune config of these families runs unchanged and trains the model of its checkpoint. The arguments are the same.
    """
    component = component_of(model) or ""
    name = component.removeprefix("torchtune.models.")
    if name == component or name not in _WRONG_BUILDERS:
        return model, None
    message = f"model: {component} {_DIFFERENCES[name.split('.')[0]]}; finch.models.{name} takes its place"
    return {**model, "_component_": f"finch.models.{name}"}, message
