"""Files of a model's folder: weight files and their index, tokenizer files. Needs torch and safetensors alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finch.errors import UserError
from finch.models.hf_config import read_json

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS_METADATA = {"format": "pt"}  # without it transformers refuses a file
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def check_files(folder: Path, names: list[str]) -> list[Path]:
    """The paths of the named weight files.

    Raises:
        UserError: names the first one that is missing.
    """
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"checkpointer.checkpoint_files names {name}, which is not in {folder}; download it or correct the name"
            )
    return [folder / name for name in names]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON as transformers does: two spaces, a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def indexed_shards(folder: Path) -> list[str] | None:
    """The names of the safetensors files that a folder's index lists; None without an index.

    Raises:
        UserError: the index is broken, or lists a file that is missing.
    """
    index = folder / SAFETENSORS_INDEX
    if not index.is_file():
        return None
    try:
        shards = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} has no weight_map of safetensors files; download it again") from error
    for shard in shards:
        if not (folder / shard).is_file():
            raise UserError(f"{index} lists {shard}, which is not in {folder}; download the missing shard")
    return shards


def copy_side_files(source: Path, target: Path, without: tuple[str, ...] = ()) -> None:
    """Copies tokenizer files, generation_config and the like: all files but weights, their index and hidden ones."""
    for path in sorted(source.iterdir()):
        is_hidden_or_weights = path.name.startswith(".") or path.name.endswith(_WEIGHT_SUFFIXES)
        if path.is_file() and not is_hidden_or_weights and path.name not in without:
            shutil.copyfile(path, target / path.name)


def open_safetensors(file: Path) -> Any:
    """A safetensors file mapped into memory: safetensors' ``safe_open``.

    Raises:
        UserError: the file is broken.
    """
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # the library has an exception of its own for each way a file can be broken
        raise UserError(
            f"{file} is not a complete safetensors file ({' '.join(str(error).split())}); write or download it again"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file, of which nothing has been read.

    Attributes:
        name: in the file.
        shape: of the complete tensor.
    """

    name: str
    shape: tuple[int, ...]
    _content: Any  # a tensor mapped into memory, or safetensors' slice

    def read(self, block: tuple[slice, ...]) -> torch.Tensor:
        """A part of the tensor, a slice for each dimension, on the CPU; only its part of the file is read."""
        part: torch.Tensor = self._content[block]
        return part

    def read_rows(self, rows: torch.Tensor, columns: tuple[slice, ...]) -> torch.Tensor:
        """Rows in any order; only the range that they lie in is read.

        Args:
            rows: [n] their numbers.
            columns: a slice for each dimension but the first.
        """
        if len(rows) == 0:
            return self.read((slice(0, 0), *columns))
        first, end = int(rows.min()), int(rows.max()) + 1
        part = self.read((slice(first, end), *columns))
        return part if torch.equal(rows, torch.arange(first, end)) else part[rows - first]


def stored_tensors(file: Path) -> Iterator[StoredTensor]:
    """A weight file's tensors; they can be read until the next one is taken.

    Raises:
        UserError: the file is broken, or holds more than weights.
    """
    if file.suffix == ".safetensors":
        with open_safetensors(file) as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                stored = content.get_slice(name)
                yield StoredTensor(name, tuple(stored.get_shape()), stored)
        return
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise UserError(
            f"{file} cannot be read as weights only ({type(error).__name__}); convert it to safetensors"
        ) from error
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{file} holds {name}, which is not a weight; give a file of the model's weights alone")
        yield StoredTensor(name, tuple(tensor.shape), tensor)


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight file's complete tensors, one at a time, under the names in the file, on the CPU.

    Raises:
        UserError: the file is broken, or holds more than weights.
    """
    for stored in stored_tensors(file):
        yield stored.name, stored.read(tuple(slice(0, size) for size in stored.shape))


def read_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of :func:`stored_tensors`; of a safetensors file only the header is read."""
    return ((stored.name, stored.shape) for stored in stored_tensors(file))
