"""A PEFT adapter merged into the weights that it changes: of a model in memory, and of a folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finch.base.errors import UserError, writing
from finch.base.files import atomic_folder
from finch.evaluation.wise_ft import rewrite
from finch.models.hf_config import read_settings
from finch.models.lora import merged_weight
from finch.weights.conversion import StateDict
from finch.weights.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, copy_side_files, read_tensors
from finch.weights.peft import PREFIX

_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
# Settings with which a layer's weight is W + s B A, as far as it is known; PEFT changes W itself when it loads other adapters, or their s.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "mica"),
}
_FREE = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "runtime_config"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "qalora_group_size", "megatron_core"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
"""Settings that may have any value; all others must be off."""


def check_adapter(folder: Path, label: str) -> dict[str, Any]:
    """The adapter's settings. Raises UserError if they are damaged, or of a kind that cannot be merged here."""
    config = read_settings(folder / ADAPTER_CONFIG)
    for key, value in config.items():
        if key not in _FREE and (value not in _PLAIN[key] if key in _PLAIN else bool(value)):
            raise UserError(
                f"{label} has {key}={value} in {ADAPTER_CONFIG}, which finch cannot merge; "
                "merge it with PEFT (merge_and_unload) and give the merged folder"
            )
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UserError(
                f"{label} has {key}={value} in {ADAPTER_CONFIG}, no number above 0; write the adapter again"
            )
    return config


def read_adapter(folder: Path, label: str) -> tuple[float, dict[str, StateDict]]:
    """The scale s, and by the names of linear layers A, B and DoRA's magnitudes: a layer's W becomes W + s * B A, s = alpha / r (rsLoRA: alpha / sqrt(r)); with
    DoRA each row of that is scaled to the stored magnitude (arXiv 2106.09685, 2312.03732, 2402.09353).

    Raises UserError for a file that is damaged, and an adapter of another kind. ``label``: what messages call it.
    """
    config = check_adapter(folder, label)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    modules: dict[str, StateDict] = {}
    for name, tensor in read_tensors(folder / ADAPTER_WEIGHTS):
        module, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if part not in _PARTS:
            raise UserError(f"{label} holds {name}, which is not part of LoRA; merge the adapter with PEFT first")
        modules.setdefault(module, {})[part] = tensor
    for name, parts in modules.items():
        if missing := [part for part in _PARTS[:2] if part not in parts]:
            raise UserError(f"{label} lacks {missing[0]} of {name}; write the adapter again")
    return scale, modules


def merge_layer(weight: torch.Tensor, parts: StateDict, scale: float, label: str) -> torch.Tensor:
    """[out, in] the weight of a layer with what :func:`read_adapter` has of it, computed in fp32 or wider and rounded once. Raises UserError if the
    shapes do not fit."""
    a, b, magnitude = (parts.get(part) for part in _PARTS)
    assert a is not None
    assert b is not None
    shape, ranks = [*b.shape[:1], *a.shape[1:]], {tuple(a.shape[:1]), tuple(b.shape[1:])}
    if shape != list(weight.shape) or len(ranks) > 1 or (magnitude is not None and magnitude.shape != b.shape[:1]):
        raise UserError(
            f"{label} of shape {shape}, in the base it has {list(weight.shape)}; give the model that it was trained on"
        )
    return merged_weight(weight, a, b, scale, magnitude).to(weight.dtype)


@torch.no_grad()
def merge_in_memory(model: nn.Module, folder: Path, label: str) -> None:
    """Changes the model's weights in place.

    Raises:
        UserError: the adapter is damaged, of a kind that cannot be merged here, or does not fit the model.
    """
    scale, modules = read_adapter(folder, label)
    embedding = next((module.weight for module in model.modules() if isinstance(module, nn.Embedding)), None)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, parts in modules.items():
        if name not in linear:
            raise UserError(
                f"{label} is for {name}, which is not a linear layer of the base; give the model that it was trained on"
            )
        weight = linear[name].weight
        if weight is embedding:
            raise UserError(
                f"{label} is for {name}, which shares its weight with the embedding; merge it with PEFT first"
            )
        weight.copy_(merge_layer(weight, parts, scale, f"{label} is for {name}"))


def merge_folder(base: Path, adapter: Path, target: Path) -> None:
    """Writes the folder ``base`` with the adapter that :class:`finch.weights.peft.PeftFolder` has written merged into its weights, in their shards and dtypes.
    Memory holds one shard. Raises UserError for a broken file, an adapter of another model, or a folder that cannot be written."""
    scale, modules = read_adapter(adapter, str(adapter))

    def merged(name: str, weight: torch.Tensor) -> torch.Tensor:
        # What is not popped when all weights have been read is for a layer that the base does not have.
        parts = modules.pop(name.removesuffix(".weight"), None)
        return weight if parts is None else merge_layer(weight, parts, scale, f"{adapter} is for {name}")

    with writing(str(target), "make room"), atomic_folder(target) as partial:
        rewrite(base, partial, merged)
        copy_side_files(adapter, partial, without=(ADAPTER_CONFIG,))  # the chat template
        for name in modules:
            raise UserError(
                f"{adapter} is for {name}, which {base} does not have; give the model that it was trained on"
            )
