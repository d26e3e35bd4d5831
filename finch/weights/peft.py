"""A trained adapter as PEFT's folder: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.modules.peft import DoRALinear

from finch.base import hub
from finch.base.dtensor import full_tensor
from finch.base.errors import UserError, WriteFailed
from finch.models.lora import AdapterLayer, adapter_layers, adapter_parameters, scaling
from finch.weights.conversion import StateDict, StoredWeight, conversion_for
from finch.weights.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    SAFETENSORS_METADATA,
    new_model_folder,
    save_tensors,
    write_json,
)
from finch.weights.huggingface import HuggingFaceFolder, PretrainedFolder

PREFIX = "base_model.model."
"""PEFT's wrapper around a model."""


class PeftFolder:
    """Writes a decoder's adapter for PEFT, transformers and vLLM. Names and layouts come from the family's conversion.

    The decoder may be sharded afterwards; ``base``, the pretrained folder, becomes ``base_model_name_or_path``.

    Layers that Hugging Face stores as one weight, such as Phi-3's projections, become one adapter of the sum of their ranks, in which each has
    its rows of B and its own ranks; all other adapters get that rank too, with zeros.

    Raises UserError if the base folder has no config.json, or PEFT's format cannot hold the adapter: its layers differ in rank or alpha, or
    DoRA is on some of the layers that are stored as one.
    """

    def __init__(self, decoder: nn.Module, base: PretrainedFolder) -> None:
        if not isinstance(base, HuggingFaceFolder):
            raise UserError(
                f"checkpointer.checkpoint_dir={base.folder} has no config.json, without which an adapter's layers have no names in PEFT's format; "
                "give the model's folder in Hugging Face's format"
            )
        self._base = base
        layers, adapters = adapter_layers(decoder), adapter_parameters(decoder)
        # adapter_config.json has one rank and one alpha for all layers.
        shapes = {(layer.lora_a.out_features, scaling(layer)) for layer in layers.values()}
        if len(shapes) > 1:
            raise UserError("the model's LoRA layers differ in rank or alpha; give them one lora_rank and lora_alpha")
        weights = ((name, tensor.to("meta")) for name, tensor in decoder.state_dict().items() if name not in adapters)
        conversion, trained = conversion_for(base.config, str(base.folder)), {f"{name}.weight" for name in layers}
        self._stored = [each for each in conversion.stored_weights(weights, base.config) if trained & each.rows.keys()]
        self._rank = 0
        for stored in self._stored:
            # PEFT scales every row of a stored weight to its magnitude; rows without DoRA have none to write there.
            [*others] = stored.rows.keys() - trained
            if others and any(isinstance(layer, DoRALinear) for layer in layers.values()):
                raise UserError(
                    f"DoRA without {others[0]} cannot be written in PEFT's format: {base.config['model_type']} models store it in one weight with "
                    "layers that have it; add it to model.lora_attn_modules, or set use_dora=False"
                )
            rank = (len(stored.rows) - len(others)) * next(iter(shapes))[0]
            self._rank = max(self._rank, rank)

    def write(self, decoder: nn.Module, target: Path, *, is_writer: bool, dtype: torch.dtype | None = None) -> None:
        """Writes the folder, replacing one that is there; it is complete or absent. Raises WriteFailed on the writer, after all ranks have gathered.

        Every rank must call it, since sharded tensors are gathered one at a time; only the writer keeps them. ``dtype``: of the stored tensors;
        None: as they are.
        """
        content: StateDict = {}
        layers = adapter_layers(decoder)
        for stored in self._stored:
            parts: dict[str, StateDict] = {}
            for name in stored.rows:
                if layer := layers.get(name.removesuffix(".weight")):
                    # A collective, so that every rank gathers; only the writer keeps the tensors.
                    tensors = {part: full_tensor(layer.get_parameter(part).detach()) for part in layer.adapter_params()}
                    parts[name] = {part: each.to("cpu", dtype or each.dtype) for part, each in tensors.items()}
            if is_writer:
                module = PREFIX + stored.name.removesuffix(".weight")
                content.update({f"{module}.{part}": each for part, each in self._to_peft(stored, parts).items()})
        if not is_writer:
            return
        config = self._config(next(iter(layers.values())))
        try:
            with new_model_folder(target) as partial:
                save_tensors(partial / ADAPTER_WEIGHTS, content, SAFETENSORS_METADATA)
                write_json(partial / ADAPTER_CONFIG, config)
                self._base.write_chat_settings(partial)
        except OSError as error:
            raise WriteFailed(str(error)) from error

    def _to_peft(self, stored: StoredWeight, parts: dict[str, StateDict]) -> StateDict:
        """The adapter of a stored weight, under PEFT's names, from those of torchtune's weights in it. B's rows and DoRA's magnitudes are where the
        weight's rows are."""
        (rows, columns), first = stored.tensor.shape, next(iter(parts.values()))
        new, rank = first["lora_a.weight"].new_zeros, len(first["lora_a.weight"])
        adapter = {"lora_A.weight": new(self._rank, columns), "lora_B.weight": new(rows, self._rank)}
        if "magnitude" in first:
            adapter["lora_magnitude_vector"] = new(rows)
        for index, (name, each) in enumerate(parts.items()):
            # Each layer has its own block of ranks, so that the sum over all ranks mixes no two layers.
            ranks, own = slice(index * rank, (index + 1) * rank), stored.rows[name]
            adapter["lora_A.weight"][ranks] = each["lora_a.weight"]
            adapter["lora_B.weight"][own, ranks] = each["lora_b.weight"]
            if "magnitude" in each:
                adapter["lora_magnitude_vector"][own] = each["magnitude"]
        return adapter

    def _config(self, layer: AdapterLayer) -> dict[str, Any]:
        # PEFT divides by the rank in the file, which is larger than the layer's where several are stored as one weight.
        alpha = scaling(layer) * self._rank
        name, _, commit = (hub.origin(self._base.folder) or "").partition("@")
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": name or str(self._base.folder),
            **({"revision": commit} if commit else {}),
            "inference_mode": True,
            "r": self._rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": layer.dropout.p if isinstance(layer.dropout, nn.Dropout) else 0.0,
            "target_modules": sorted({stored.name.split(".")[-2] for stored in self._stored}),
            "bias": "none",
            "use_dora": isinstance(layer, DoRALinear),
            "use_rslora": False,
            "fan_in_fan_out": False,
            "modules_to_save": None,
        }
