"""The model families that finch trains, by config.json's model_type, and how a Hugging Face folder's config.json is read.

Needs neither torch nor torchtune.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from finch.base import hub
from finch.base.errors import UserError
from finch.base.files import read_bytes

CONFIG = "config.json"
_TIED_BY_DEFAULT = ("gemma", "gemma2")
# transformers', of models with one here and not in finch
_DEFAULT_WINDOW = {"mistral": 4096, "phi3": None, "qwen2": 4096, "qwen3": 4096}
# Old files of these families lack the base of the rotary embedding where it is transformers' default; Qwen's have it.
_HAS_DEFAULT_ROPE_BASE = ("llama", "mistral", "gemma", "gemma2", "phi3")


@dataclass(frozen=True)
class Family:
    """A family of models, as its publisher names it, with examples from the Hugging Face hub.

    ``builders``: dotted paths of those that make it from its sizes; ``packages``: those under torchtune.models and finch.models whose builders
    make such a model; ``has_lora``: whether each builder has a counterpart with LoRA layers, ``lora_`` before its name.
    """

    name: str
    examples: tuple[str, ...]
    builders: tuple[str, ...]
    packages: tuple[str, ...]
    has_lora: bool = True


FAMILIES = {
    "llama": Family(
        "Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2",
        (
            "meta-llama/Llama-2-7b-hf",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Llama-3.2-1B-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        ("torchtune.models.llama3.llama3", "torchtune.models.llama3_1.llama3_1", "torchtune.models.llama3_2.llama3_2"),
        ("llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "code_llama2"),
    ),
    "mistral": Family(
        "Mistral",
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("torchtune.models.mistral.mistral",),
        ("mistral",),
    ),
    "gemma": Family("Gemma", ("google/gemma-2b", "google/gemma-7b-it"), ("torchtune.models.gemma.gemma",), ("gemma",)),
    "gemma2": Family(
        "Gemma 2",
        ("google/gemma-2-2b-it", "google/gemma-2-9b"),
        ("finch.models.gemma2.gemma2",),
        ("gemma2",),
        has_lora=False,
    ),
    "phi3": Family(
        "Phi-3 and Phi-4",
        ("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"),
        ("torchtune.models.phi3.phi3",),
        ("phi3", "phi4"),
    ),
    "qwen2": Family(
        "Qwen2 and Qwen2.5",
        ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("torchtune.models.qwen2.qwen2",),
        ("qwen2", "qwen2_5"),
    ),
    "qwen3": Family(
        "Qwen3",
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
        ("finch.models.qwen3.qwen3",),
        ("qwen3",),
    ),
}


_COUNT = (int, "a whole number")
_NUMBER = (Real, "a number")
_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"), _COUNT),
    **dict.fromkeys(("num_attention_heads", "num_hidden_layers", "num_key_value_heads"), _COUNT),
    **dict.fromkeys(("max_window_layers", "sliding_window"), _COUNT),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), _NUMBER),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict, "a block of settings")),
    "layer_types": (list, "a list"),
}


def check_folder(path: str | Path, option: str = "checkpointer.checkpoint_dir") -> Path:
    """The path, if it is a folder; otherwise raises UserError that names the hub's.

    ``option``: the config key or command-line option it was given by, for messages.
    """
    folder = Path(path)
    if folder.is_dir():
        # A pipe, which a library would open and wait for, is refused before one does.
        for each in (*folder.glob("*"), *folder.glob("*/*")):  # of which libraries may open any
            if each.exists() and not (each.is_file() or each.is_dir()):
                raise UserError(f"{option}={path} holds {each.name}, which is neither a file nor a folder; remove it")
        return folder
    # The model of that name among the families' examples; else the form of such a name.
    names = {name.partition("/")[2]: name for family in FAMILIES.values() for name in family.examples}
    key = option if option.startswith("--") else "model_dir"
    raise UserError(
        f"{option}={path} is not a folder; correct the path, or give a model of the hub: {key}={hub.origin(path) or names.get(folder.name, 'OWNER/NAME')}"
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises UserError if it is not JSON."""
    try:
        return json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError if there is none."""
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no settings; download it again")
    return settings


def read_config(folder: Path, option: str = "checkpointer.checkpoint_dir") -> dict[str, Any]:
    """The content of a folder's config.json; ``option`` as in :func:`check_folder`. Raises UserError if the file is missing or not JSON."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{option}={folder} has no {CONFIG}; give a folder in Hugging Face's format")
    config = read_settings(folder / CONFIG)
    for key, (kind, name) in _KINDS.items():
        value = config.get(key)
        # To Python true is the whole number 1.
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{CONFIG} of {option}={folder} has {key}={value}, not {name}; download it again")
    return config


def is_tied(config: dict[str, Any]) -> bool:
    """Whether the output layer of config.json's model is its embedding."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT))


def attention_window(config: dict[str, Any]) -> int | None:
    """Tokens that some layer of config.json's model attends to where finch's model has no such limit; None: both attend to all."""
    model_type = str(config.get("model_type"))
    if model_type.startswith("qwen"):
        first, end = config.get("max_window_layers"), config.get("num_hidden_layers") or 0
        # Older files have no kinds: layers from max_window_layers on have the window; transformers' default is 28.
        kinds = config.get("layer_types") or ["sliding_attention"] * (end - (28 if first is None else first))
        if not config.get("use_sliding_window") or "sliding_attention" not in kinds:
            return None
    return config.get("sliding_window", _DEFAULT_WINDOW[model_type]) if model_type in _DEFAULT_WINDOW else None


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding's settings; newer files keep them under one key, older ones under two.

    ``rope_type``, ``rope_theta`` and ``partial_rotary_factor`` are always there, the latter two None where config.json has no value.
    """
    # As transformers reads a file that has keys of both kinds.
    block = config.get("rope_scaling") or config.get("rope_parameters") or {}
    settings = {"rope_theta": config.get("rope_theta"), **block}
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    base = settings.get("rope_theta") or (10000.0 if config.get("model_type") in _HAS_DEFAULT_ROPE_BASE else None)
    fraction = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return {**settings, "rope_type": rope_type, "rope_theta": base, "partial_rotary_factor": fraction}
