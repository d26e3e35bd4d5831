"""Hugging Face folders in and out: safetensors, config.json, tokenizer files.

Takes torchtune's `checkpointer:` block for every model that finch can convert. Weights are read from safetensors, or
by torch.load with weights_only; no code in a folder is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torchtune.modules import TransformerDecoder

from finch.errors import UserError
from finch.weights.base import PretrainedFolder, check_files, check_folder, copy_side_files
from finch.weights.conversion import StateDict, conversion_for, is_tied
from finch.weights.validation import validate_against_hf_config

CONFIG = "config.json"
SAFETENSORS_INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
# The other places where a config keeps the dtype that transformers loads the weights in.
_DTYPE_KEYS = ("dtype", "torch_dtype")


class HuggingFaceFolder(PretrainedFolder):
    """A pretrained model's folder, and the form in which the tuned one is written.

    Args:
        checkpoint_dir: folder with config.json, tokenizer files and weights.
        checkpoint_files: names of the weight files, or torchtune's ``{filename_format, max_filename}``; None: the
            folder's index, or its model.safetensors; an empty list: a folder without weights, to be written from.

    The other keys of torchtune's block are taken so that it works unchanged: output_dir (the recipe's own decides),
    model_type (config.json knows), recipe_checkpoint, adapter_checkpoint, safe_serialization,
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
        config_file = self.folder / CONFIG
        if not config_file.is_file():
            raise UserError(
                f"checkpointer.checkpoint_dir={checkpoint_dir} has no config.json; give a folder in Hugging Face's format"
            )
        try:
            self.config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{config_file} is not JSON ({error}); download it again") from error
        self._conversion = conversion_for(self.config, checkpoint_dir)
        self.files = check_files(self.folder, self._file_names(checkpoint_files))

    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with config.json, then with the stored shapes.

        Raises:
            UserError: see :func:`finch.weights.validation.validate_against_hf_config` and ``check_shapes``.
        """
        validate_against_hf_config(model, component, self.config, str(self.folder))
        self.check_shapes(model)

    def _to_tune(self, weights: StateDict) -> StateDict:
        return self._conversion.to_tune(weights, self.config)

    def _head_is_tied(self) -> bool:
        return is_tied(self.config)

    def _expected(self) -> str:
        return f"the {self.config['model_type']} model of its config.json"

    def _write_into(self, target: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """A folder that transformers loads; at most one file's worth of weights is held at a time."""
        parts: list[StateDict] = [{}]
        index: dict[str, int] = {}
        part_bytes = total = 0
        dtype: torch.dtype | None = None
        for stored, value in self._conversion.stream_to_hugging_face(weights, self.config):
            size = value.numel() * value.element_size()
            if parts[-1] and part_bytes + size > MAX_SHARD_BYTES:
                save_file(parts[-1], target / f"part-{len(parts)}", metadata={"format": "pt"})
                parts[-1] = {}
                parts.append({})
                part_bytes = 0
            parts[-1][stored] = value.contiguous()
            index[stored] = len(parts)
            part_bytes, total = part_bytes + size, total + size
            dtype = value.dtype
        save_file(parts[-1], target / f"part-{len(parts)}", metadata={"format": "pt"})
        names = {
            part: "model.safetensors" if len(parts) == 1 else f"model-{part:05}-of-{len(parts):05}.safetensors"
            for part in index.values()
        }
        for part, file_name in names.items():
            (target / f"part-{part}").rename(target / file_name)
        if len(parts) > 1:
            content = {
                "metadata": {"total_size": total},
                "weight_map": {name: names[part] for name, part in index.items()},
            }
            (target / SAFETENSORS_INDEX).write_text(
                json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        copy_side_files(self.folder, target, without=(CONFIG,))
        config = dict(self.config)
        keys = [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]
        config.update({key: str(dtype).removeprefix("torch.") for key in keys})  # the dtype the weights now have
        (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _file_names(self, files: list[str] | Mapping[str, str] | None) -> list[str]:
        index = self.folder / SAFETENSORS_INDEX
        if files is None:
            if index.is_file():
                return self._indexed(index)
            return ["model.safetensors"]
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
        if index.is_file() and any(name.endswith(".safetensors") for name in names):
            left_out = sorted(set(self._indexed(index)) - set(names))
            if left_out:
                raise UserError(
                    f"checkpointer.checkpoint_files leaves out {left_out[0]}, which {index} needs; name every shard"
                )
        return names

    def _indexed(self, index: Path) -> list[str]:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for shard in shards:
            if not (self.folder / shard).is_file():
                raise UserError(f"{index} lists {shard}, which is not in {self.folder}; download the missing shard")
        return shards
