"""A PEFT adapter merged into the weights that it changes: of a model in memory, and of a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from finch.base.errors import UserError
from finch.base.files import atomic_folder
from finch.weights.files import ADAPTER_CONFIG, copy_side_files, rewrite
from finch.weights.peft import merge_layer, read_adapter


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

    try:
        with atomic_folder(target) as partial:
            rewrite(base, partial, merged)
            copy_side_files(adapter, partial, without=(ADAPTER_CONFIG,))  # the chat template
            for name in modules:
                raise UserError(
                    f"{adapter} is for {name}, which {base} does not have; give the model that it was trained on"
                )
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target} cannot be written ({error}); make room") from error
