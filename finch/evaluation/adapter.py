"""A PEFT adapter merged into the weights of its model, in memory.

PEFT's own loader refuses to run beside the torchao that torchtune needs, and a merged model answers faster. LoRA and DoRA on linear
layers, as finch and PEFT write them: W + s * B A, s = alpha / r (rsLoRA: alpha / sqrt(r)); with DoRA each row of that is scaled to the
stored magnitude (arXiv 2106.09685, 2312.03732, 2402.09353). Computed in fp32, rounded once to the model's dtype.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finch.errors import UserError
from finch.evaluation.model_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from finch.models.hf_config import read_settings
from finch.weights.files import read_tensors

_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
# Settings that would change the formula, and the values under which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "use_qalora": (False, None),
}


def check_adapter(folder: Path, label: str) -> dict[str, Any]:
    """The adapter's settings.

    Raises:
        UserError: the adapter is of a kind that cannot be merged here.
    """
    config = read_settings(folder / ADAPTER_CONFIG)
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise UserError(
                f"{label} has {key}={config[key]} in {ADAPTER_CONFIG}, which finch cannot merge; "
                "merge it with PEFT (merge_and_unload) and give the merged folder"
            )
    return config


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path, label: str) -> None:
    """Changes the model's weights in place.

    Raises:
        UserError: the adapter does not fit the model.
    """
    config = check_adapter(folder, label)
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in read_tensors(folder / ADAPTER_WEIGHTS):
        module, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if part not in _PARTS:
            raise UserError(f"{label} holds {name}, which is no part of LoRA; merge the adapter with PEFT first")
        modules.setdefault(module, {})[part] = tensor
    embedding = next((module.weight for module in model.modules() if isinstance(module, nn.Embedding)), None)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, parts in modules.items():
        if name not in linear or not {"lora_A", "lora_B"} <= parts.keys():
            raise UserError(
                f"{label} is for {name}, which is no linear layer of the base; give the model that it was trained on"
            )
        weight = linear[name].weight
        if weight is embedding:
            raise UserError(
                f"{label} is for {name}, which shares its weight with the embedding; merge it with PEFT first"
            )
        a, b = (parts[part].to(weight.device, torch.float32) for part in ("lora_A", "lora_B"))
        if (b.shape[0], a.shape[1]) != weight.shape:
            raise UserError(
                f"{label} is for {name} of shape {[b.shape[0], a.shape[1]]}, in the base it has {list(weight.shape)}; "
                "give the model that it was trained on"
            )
        merged = weight.float() + scale * (b @ a)
        if "lora_magnitude_vector" in parts:
            magnitude = parts["lora_magnitude_vector"].to(weight.device, torch.float32)
            merged *= (magnitude / merged.norm(dim=1)).unsqueeze(1)
        weight.copy_(merged)
