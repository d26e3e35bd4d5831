"""The formats that torchtune's checkpointers read, by the component of the `checkpointer:` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchtune.models.convert_weights import meta_to_tune, tune_to_meta
from torchtune.modules import TransformerDecoder
from torchtune.training import FullModelHFCheckpointer, FullModelMetaCheckpointer, FullModelTorchTuneCheckpointer

from finch.base.errors import UserError
from finch.base.files import is_disk_error
from finch.config.instantiate import build, locate
from finch.models.hf_config import CONFIG, check_folder, read_json
from finch.weights.conversion import EMBEDDING, HEAD, StateDict, rows_of
from finch.weights.files import check_files, copy_side_files, stored_tensors
from finch.weights.huggingface import HuggingFaceFolder, Part, PretrainedFolder, validate_against_hf_config

PARAMS = "params.json"
_Convert = Callable[[StateDict], StateDict]


def open_checkpoint(block: Mapping[str, Any]) -> PretrainedFolder:
    """The pretrained folder of a config's ``checkpointer:`` block, whose ``_component_`` is one of torchtune's FullModel checkpointers.

    A Hugging Face folder is written for the tuned weights wherever config.json is known: in checkpoint_dir or, as for
    ``original/`` in Meta's repositories, in its parent. Otherwise the tuned weights are written in the format they were read.

    Raises UserError if the component is another one, a folder or file is missing, and for torchtune's files of a run that is resumed: none is read.
    """
    for key in ("recipe_checkpoint", "adapter_checkpoint"):
        if block.get(key) is not None:
            remedy = "a run of finch goes on by resume_from_checkpoint=True; of an adapter give the merged model as checkpoint_dir"
            raise UserError(f"checkpointer.{key}={block[key]} would not be read; leave it out: {remedy}")
    path = str(block["_component_"])
    component = locate(path, "checkpointer")
    for checkpointer, folder in _FORMATS.items():
        if component is checkpointer:
            return build({**block, "_component_": f"{folder.__module__}.{folder.__name__}"}, "checkpointer")
    raise UserError(
        f"checkpointer._component_={path} is not supported by this recipe; use torchtune.training.FullModelHFCheckpointer, "
        "FullModelMetaCheckpointer or FullModelTorchTuneCheckpointer"
    )


def meta_folder(checkpoint_dir: str, checkpoint_files: list[str], **_: Any) -> PretrainedFolder:
    """A folder in Meta's format, such as ``original/`` with one weight file, consolidated.00.pth, and params.json.

    The other keys of torchtune's block are ignored; a config's check refuses those that its checkpointer does not accept.
    Raises UserError if a folder or file is missing, or the weights are in several files.
    """
    return _folder(checkpoint_dir, checkpoint_files, meta_to_tune, tune_to_meta)


def torchtune_folder(checkpoint_dir: str, checkpoint_files: list[str], **_: Any) -> PretrainedFolder:
    """A folder in torchtune's own format. Arguments and errors: see :func:`meta_folder`."""
    return _folder(checkpoint_dir, checkpoint_files, dict, dict)


def _folder(
    checkpoint_dir: str, names: list[str], to_torchtune: _Convert, from_torchtune: _Convert
) -> PretrainedFolder:
    folder = check_folder(checkpoint_dir)
    if not isinstance(names, list | tuple) or len(names) != 1:
        raise UserError(
            f"checkpointer.checkpoint_files={names} must name one file in this format; for weights in several files give the Hugging Face folder "
            "and torchtune.training.FullModelHFCheckpointer"
        )
    files = check_files(folder, [str(name) for name in names])
    # Resolved, since a path such as . has no parent of its own.
    for home in (folder, folder.resolve().parent):
        if (home / CONFIG).is_file():
            return ConvertedFolder(home, files, to_torchtune)
    return NativeFolder(folder, files, to_torchtune, from_torchtune)


class ConvertedFolder(HuggingFaceFolder):
    """Weights in another format, written as a Hugging Face folder: ``home`` has config.json and the tokenizer files."""

    def __init__(self, home: Path, files: list[Path], to_torchtune: _Convert) -> None:
        super().__init__(str(home), checkpoint_files=[])
        self.files = files
        self._convert = to_torchtune

    def _to_torchtune(self, weights: StateDict) -> StateDict:
        return self._convert(weights)

    def _rows_to_torchtune(self, name: str, num_rows: int) -> dict[str, torch.Tensor]:
        return rows_of(self._convert, name, num_rows)


class NativeFolder(PretrainedFolder):
    """Weights in Meta's or torchtune's format without a config.json; the tuned ones are written in the same format.

    In Meta's format the folder has a params.json. Raises UserError if that is not JSON.
    """

    def __init__(self, folder: Path, files: list[Path], to_torchtune: _Convert, from_torchtune: _Convert) -> None:
        self.folder, self.files = folder, files
        self._convert, self._convert_back = to_torchtune, from_torchtune
        self._params: dict[str, Any] = read_json(folder / PARAMS) if (folder / PARAMS).is_file() else {}

    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with params.json where there is one, then with the stored shapes."""
        if self._params:
            validate_against_hf_config(model, component, _to_hf_config(self._params), str(self.folder), PARAMS)
        self.check_shapes(model)

    def _to_torchtune(self, weights: StateDict) -> StateDict:
        return self._convert(weights)

    def _write_into(self, target: Path, like: StateDict, parts: Iterator[Part]) -> None:
        """One file under the name it was read from. All weights are held in memory, since they are pickled together."""
        state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in like.items()}
        for name, block, values in parts:
            state[name][block] = values
        # A tied model has no head of its own, but a folder in Meta's format has: what is written is like what was read.
        if HEAD not in state and any(
            HEAD in self._to_torchtune({each.name: torch.empty(each.shape, device="meta")})
            for each in stored_tensors(self.files[0])
        ):
            state[HEAD] = state[EMBEDDING]
        try:
            torch.save(self._convert_back(state), target / self.files[0].name)
        except RuntimeError as error:
            if not is_disk_error(error):
                raise
            raise OSError(f"{self.files[0].name} could not be written completely") from error
        copy_side_files(self.folder, target)


def _to_hf_config(params: dict[str, Any]) -> dict[str, Any]:
    """The keys of params.json under config.json's names. It does not say by how much the rotary embedding is scaled."""
    return {
        "num_attention_heads": params.get("n_heads"),
        "num_key_value_heads": params.get("n_kv_heads") or params.get("n_heads"),
        "rms_norm_eps": params.get("norm_eps"),
        "rope_parameters": {
            "rope_theta": params.get("rope_theta", 10000.0),
            "rope_type": "llama3" if params.get("use_scaled_rope") else "default",
        },
    }


_FORMATS: dict[Any, Any] = {
    FullModelHFCheckpointer: HuggingFaceFolder,
    HuggingFaceFolder: HuggingFaceFolder,
    FullModelMetaCheckpointer: meta_folder,
    FullModelTorchTuneCheckpointer: torchtune_folder,
}
