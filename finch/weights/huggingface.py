"""Hugging Face folders in and out: safetensors, config.json, tokenizer files.

Accepts torchtune's `checkpointer:` block for every model that finch can convert. Weights are read from safetensors, or
by torch.load with weights_only; no code in a folder is ever run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchtune.modules import TransformerDecoder

from finch.errors import UserError
from finch.models.hf_config import CONFIG, check_folder, is_tied, read_config
from finch.weights.base import Part, PretrainedFolder
from finch.weights.conversion import StateDict, StoredWeight, conversion_for
from finch.weights.files import (
    SAFETENSORS,
    SAFETENSORS_INDEX,
    check_files,
    copy_side_files,
    indexed_shards,
    write_json,
)
from finch.weights.safetensors_writer import SafetensorsWriter
from finch.weights.validation import validate_against_hf_config

MAX_SHARD_BYTES = 5 * 10**9
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json; newer and older transformers


class HuggingFaceFolder(PretrainedFolder):
    """A pretrained model's folder in Hugging Face's format; tuned models are written in the same format.

    Args:
        checkpoint_dir: folder with config.json, tokenizer files and weights.
        checkpoint_files: names of the weight files, or torchtune's ``{filename_format, max_filename}``; None: the
            files of the folder's index, or its model.safetensors; an empty list: read no weights from this folder.

    The other keys of torchtune's block are accepted and ignored, so that it works unchanged: output_dir (the recipe's own
    is used), model_type (config.json has it), recipe_checkpoint, adapter_checkpoint, safe_serialization,
    should_load_recipe_state, resume_from_checkpoint.

    Raises:
        UserError: a missing folder, config.json, weight file or shard.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: list[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        recipe_checkpoint: str | None = None,
        adapter_checkpoint: str | None = None,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        resume_from_checkpoint: bool = False,
    ) -> None:
        self.folder = check_folder(checkpoint_dir)
        self.config: dict[str, Any] = read_config(self.folder)
        self._conversion = conversion_for(self.config, checkpoint_dir)
        self.files = check_files(self.folder, self._file_names(checkpoint_files))

    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with config.json, then with the stored shapes.

        Raises:
            UserError: see :func:`finch.weights.validation.validate_against_hf_config` and ``check_shapes``.
        """
        validate_against_hf_config(model, component, self.config, str(self.folder))
        self.check_shapes(model)

    def _to_torchtune(self, weights: StateDict) -> StateDict:
        return self._conversion.to_torchtune(weights, self.config)

    def _rows_to_torchtune(self, name: str, num_rows: int) -> dict[str, torch.Tensor]:
        return self._conversion.rows_to_torchtune(name, num_rows, self.config)

    def _is_head_tied(self) -> bool:
        return is_tied(self.config)

    def _model_name(self) -> str:
        return f"the {self.config['model_type']} model of its config.json"

    def _write_into(self, target: Path, like: StateDict, parts: Iterator[Part]) -> None:
        """A folder that transformers loads; the files grow as the parts come."""
        stored_weights = list(self._conversion.stored_weights(like.items(), self.config))
        shards = _shards(stored_weights)
        if len(shards) == 1:
            names = [SAFETENSORS]
        else:
            names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
            weight_map = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
            total_bytes = sum(weight.tensor.nbytes for weight in stored_weights)
            metadata = {"total_size": total_bytes}
            write_json(
                target / SAFETENSORS_INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            )
        with contextlib.ExitStack() as stack:
            place_of = {}
            for name, shard in zip(names, shards, strict=True):
                file = SafetensorsWriter(target / name, {weight.name: weight.tensor for weight in shard})
                stack.enter_context(file)
                place_of.update({member: (file, weight) for weight in shard for member in weight.rows})
            for name, (rows, *columns), values in parts:
                file, weight = place_of[name]
                file.write_rows(weight.name, weight.rows[name][rows], tuple(columns), values)
        dtype = stored_weights[-1].tensor.dtype
        copy_side_files(self.folder, target, without=(CONFIG,))
        dtype_keys = [key for key in _DTYPE_KEYS if key in self.config] or ["torch_dtype"]
        write_json(target / CONFIG, self.config | dict.fromkeys(dtype_keys, str(dtype).removeprefix("torch.")))

    def _file_names(self, files: list[str] | Mapping[str, str] | None) -> list[str]:
        if files is None:
            return indexed_shards(self.folder) or [SAFETENSORS]
        if isinstance(files, Mapping):
            if set(files) != {"filename_format", "max_filename"}:
                raise UserError(
                    f"checkpointer.checkpoint_files={dict(files)} must be a list of names, or have filename_format and max_filename"
                )
            last = str(files["max_filename"])
            return [
                files["filename_format"].format(str(number + 1).zfill(len(last)), last) for number in range(int(last))
            ]
        names = sorted(str(name) for name in files)
        if any(name.endswith(".safetensors") for name in names):
            missing = sorted(set(indexed_shards(self.folder) or ()) - set(names))
            if missing:
                raise UserError(
                    f"checkpointer.checkpoint_files leaves out {missing[0]}, which {self.folder / SAFETENSORS_INDEX} lists; name every shard"
                )
        return names


def _shards(weights: list[StoredWeight]) -> list[list[StoredWeight]]:
    """The weights of each file, in the given order."""
    shards: list[list[StoredWeight]] = [[]]
    num_bytes = 0
    for weight in weights:
        if shards[-1] and num_bytes + weight.tensor.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(weight)
        num_bytes += weight.tensor.nbytes
    return shards
