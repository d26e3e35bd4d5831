"""Hugging Face folders in and out: safetensors, config.json, tokenizer files.

Accepts torchtune's `checkpointer:` block for every model that finch can convert. Weights are read from safetensors, or
by torch.load with weights_only; no code in a folder is ever run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torchtune.modules import TransformerDecoder

from finch.errors import UserError
from finch.models.hf_config import CONFIG, check_folder, is_tied, read_config
from finch.weights.base import PretrainedFolder
from finch.weights.conversion import StateDict, conversion_for
from finch.weights.files import (
    SAFETENSORS,
    SAFETENSORS_INDEX,
    SAFETENSORS_METADATA,
    check_files,
    copy_side_files,
    indexed_shards,
    write_json,
)
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

    def _write_into(self, target: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """A folder that transformers loads; at most one shard of the weights is held at a time."""
        shard: StateDict = {}
        shard_of: dict[str, int] = {}
        shard_number, shard_bytes, total_bytes = 1, 0, 0
        dtype: torch.dtype | None = None
        for name, tensor in self._conversion.stream_to_hugging_face(weights, self.config):
            if shard and shard_bytes + tensor.nbytes > MAX_SHARD_BYTES:
                save_file(shard, target / f"shard-{shard_number}", SAFETENSORS_METADATA)
                shard, shard_number, shard_bytes = {}, shard_number + 1, 0
            shard[name], shard_of[name] = tensor.contiguous(), shard_number
            shard_bytes, total_bytes, dtype = shard_bytes + tensor.nbytes, total_bytes + tensor.nbytes, tensor.dtype
        save_file(shard, target / f"shard-{shard_number}", SAFETENSORS_METADATA)
        if shard_number == 1:
            (target / "shard-1").rename(target / SAFETENSORS)
        else:  # the names say how many there are
            file_of = {n: f"model-{n:05}-of-{shard_number:05}.safetensors" for n in range(1, shard_number + 1)}
            for number, file_name in file_of.items():
                (target / f"shard-{number}").rename(target / file_name)
            weight_map = {name: file_of[number] for name, number in sorted(shard_of.items())}
            write_json(target / SAFETENSORS_INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
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
