"""Files of a model's folder: weight files and their index, tokenizer files. Needs only torch and safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finch.base.errors import UserError
from finch.base.files import atomic_folder
from finch.base.log import logger
from finch.checkpoint import manifest
from finch.models.hf_config import read_json

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SAFETENSORS_METADATA = {"format": "pt"}  # without it transformers refuses a file
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_DTYPES = {
    **{torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32"},
    **{torch.bfloat16: "BF16", torch.float16: "F16"},
}
"""safetensors' names of dtypes, in the order in which a file has their tensors."""
_ALIGNMENT = 8  # bytes


def check_files(folder: Path, names: list[str]) -> list[Path]:
    """The paths of the named weight files. Raises UserError for the first one that is missing."""
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, which checkpointer.checkpoint_files names; download it, or give another folder or name"
            )
    return [folder / name for name in names]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON as transformers does: two spaces, a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def indexed_shards(folder: Path) -> list[str] | None:
    """The names of the safetensors files that a folder's index lists; None without an index. Raises UserError if the index is broken, or
    lists a file that is missing."""
    index = folder / SAFETENSORS_INDEX
    if not index.is_file():
        return None
    try:
        shards = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} has no weight_map of safetensors files; download it again") from error
    for shard in shards:
        # Such a name would lead out of the folder, which may be somebody else's download.
        if Path(shard).name != shard:
            raise UserError(f"{index} lists {shard}, which is not the name of a file; download it again")
        if not (folder / shard).is_file():
            raise UserError(f"{index} lists {shard}, which is not in {folder}; download the missing shard")
    return shards


def is_whole(folder: Path) -> bool:
    """Whether a model's or an adapter's folder has its config and, by their headers, sizes and the index, all its weights; they are not read."""
    try:
        check_export(folder)
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        config, weights = (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if is_adapter else ("config.json", SAFETENSORS)
        if not (folder / config).is_file() or not read_json(folder / config):
            return False
        shards = indexed_shards(folder)
        opened = (open_safetensors(folder / shard) for shard in shards or [weights])
        # A shard may be whole and still not be the one that the index was written for.
        stored = {name for shard in opened for name in shard.keys()}  # noqa: SIM118 (not a dict)
        return shards is None or stored == set(read_json(folder / SAFETENSORS_INDEX)["weight_map"])
    except UserError:
        return False


@contextlib.contextmanager
def new_model_folder(target: Path) -> Iterator[Path]:
    """An :func:`finch.base.files.atomic_folder` for a model; sizes and digests of its files are written beside them."""
    with atomic_folder(target) as partial:
        yield partial
        entries = {path.name: manifest.file_entry(path) for path in partial.iterdir()}
        manifest.write(partial, entries, manifest.EXPORTS)


def check_export(folder: Path, *, by_digest: bool = False) -> None:
    """Raises UserError if a file of a model that finch has written is missing, has another size, or with ``by_digest`` another content."""
    if not (folder / manifest.EXPORTS).is_file():
        if by_digest:
            logger.warning(f"{folder} has no {manifest.EXPORTS}: its files are taken as they are")
        return
    try:
        entries = manifest.read(folder, manifest.EXPORTS)
        manifest.verify(folder, entries, entries, by_digest=by_digest)
    except manifest.CorruptCheckpoint as error:
        remedy = f"restore it, or remove {manifest.EXPORTS} where you have changed it yourself"
        raise UserError(f"{folder}: {error}; {remedy}") from error


def is_own(path: Path) -> bool:
    """Whether a file of a folder lies there, or is a link of the hub's cache to its blobs: others lead to what is not the folder's."""
    folder, real = path.parent.resolve(), path.resolve()
    # The hub's cache has snapshots/REVISION/NAME, a link to ../../blobs/HASH.
    is_blob = folder.parent.name == "snapshots" and real.parent == folder.parents[1] / "blobs"
    return path.is_file() and (is_blob or real.is_relative_to(folder))


def side_files(folder: Path) -> list[Path]:
    """Tokenizer files, generation_config and the like: all files but weights, their index and hidden ones."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    left_out = (*_WEIGHT_SUFFIXES, manifest.EXPORTS)
    return [
        path for path in found if path.is_file() and not path.name.startswith(".") and not path.name.endswith(left_out)
    ]


def copy_side_files(source: Path, target: Path, without: tuple[str, ...] = ()) -> None:
    """Copies :func:`side_files`. A link to elsewhere is left out, and a log line says so: somebody else may have made it."""
    for path in side_files(source):
        if path.name in without:
            continue
        if is_own(path):
            shutil.copyfile(path, target / path.name)
        else:
            logger.warning(f"{path} is a link out of its folder and is not copied; put a copy in its place")


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """A new safetensors file. safetensors' ``save_file`` leaves a temporary file next to it when it is killed."""
    with SafetensorsWriter(path, tensors, metadata) as file:
        for name, tensor in tensors.items():
            # The size of an empty tensor's row cannot be asked; its place in the file has no bytes.
            if tensor.numel():
                file.write_rows(
                    name, torch.arange(len(tensor)), tuple(slice(0, size) for size in tensor.shape[1:]), tensor
                )


def open_safetensors(file: Path) -> Any:
    """A safetensors file mapped into memory. Raises UserError if it is broken."""
    try:
        if not file.is_file():  # a pipe would keep its reader waiting
            raise FileNotFoundError("there is no such file")
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # the library has a separate exception for each way a file can be broken
        raise UserError(
            f"{file} is not a complete safetensors file ({' '.join(str(error).split())}); write or download it again"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file, of which nothing has been read."""

    name: str
    shape: tuple[int, ...]
    _content: Any  # a tensor mapped into memory, or safetensors' slice

    def read(self, block: tuple[slice, ...]) -> torch.Tensor:
        """A part of the tensor, a slice for each dimension, on the CPU; only its part of the file is read."""
        return self._content[block]

    def read_rows(self, rows: torch.Tensor, columns: tuple[slice, ...]) -> torch.Tensor:
        """Rows [n] in any order; only the range that they lie in is read. ``columns``: a slice for each further dimension."""
        if len(rows) == 0:
            return self.read((slice(0, 0), *columns))
        first, end = int(rows.min()), int(rows.max()) + 1
        part = self.read((slice(first, end), *columns))
        # Rows in their own order need no copy; those of a permuted head do.
        return part if torch.equal(rows, torch.arange(first, end)) else part[rows - first]


def stored_tensors(file: Path) -> Iterator[StoredTensor]:
    """A weight file's tensors; they can be read until the next one is taken, before which of a safetensors file only the header is read. Raises
    UserError if the file is broken, or holds more than weights."""
    if file.suffix == ".safetensors":
        with open_safetensors(file) as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                stored = content.get_slice(name)
                yield StoredTensor(name, tuple(stored.get_shape()), stored)
        return
    try:
        # Mapped, so that only the parts that a rank asks for are read.
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise UserError(
            f"{file} cannot be read as weights only ({type(error).__name__}); convert it to safetensors"
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{file} holds no weights by name; convert the model to safetensors")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{file} holds {name}, which is not a weight; give a file of only the model's weights")
        yield StoredTensor(name, tuple(tensor.shape), tensor)


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The complete tensors of :func:`stored_tensors`, one at a time, on the CPU."""
    for stored in stored_tensors(file):
        yield stored.name, stored.read(tuple(slice(0, size) for size in stored.shape))


class SafetensorsWriter:
    """A safetensors file that is written in parts, a context manager: the header first, then rows of its tensors in any order.

    ``safetensors.torch.save_file`` needs all tensors of a file in memory. The file is the same, byte for byte.

    ``path`` must not exist; ``tensors``, by name, give shapes and dtypes and may be on the meta device. Raises OSError if the file cannot be
    written, from ``write_rows`` as well.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = SAFETENSORS_METADATA
    ) -> None:
        self._tensors, self._path, dtypes = tensors, path, list(_DTYPES)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        # The order of safetensors' own writer, so that an export is the same file, byte for byte.
        for name, tensor in sorted(tensors.items(), key=lambda item: (dtypes.index(item[1].dtype), item[0])):
            start, end = end, end + tensor.nbytes
            self._offsets[name] = start
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # JSON ignores the spaces at its end, which bring the tensors to a multiple of 8 bytes as safetensors does.
        text = text.ljust(math.ceil(len(text) / _ALIGNMENT) * _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text

    def __enter__(self) -> SafetensorsWriter:
        # Permissions are left to the umask; a file that is there already is never written over.
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(memoryview(self._header), 0)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write_rows(self, name: str, rows: torch.Tensor, columns: tuple[slice, ...], values: torch.Tensor) -> None:
        """Writes a part of a tensor.

        Args:
            rows: [n] numbers of the tensor's rows, in any order.
            columns: a slice for each of its dimensions but the first.
            values: [n, ...] of those rows and columns, on the CPU; cast to the file's dtype.
        """
        tensor = self._tensors[name]
        rows, order = rows.sort()
        # Most parts come in order: they are written without a copy.
        if not torch.equal(order, torch.arange(len(order))):
            values = values[order]
        # Bytes, since NumPy has no bfloat16.
        data = values.to(tensor.dtype).contiguous().flatten().view(torch.uint8).numpy().data
        row_bytes = tensor[0].nbytes
        # Within a row, the part is contiguous if it has one dimension, or all columns.
        start = columns[0].start * tensor[0, 0].nbytes if columns else 0
        part_bytes = len(data) // max(1, len(rows))
        is_next = rows.diff() == 1 if part_bytes == row_bytes else torch.zeros(max(0, len(rows) - 1), dtype=torch.bool)
        # Rows that follow each other in the file are one write, not a system call each.
        first_of_runs = [0, *((~is_next).nonzero().squeeze(1) + 1).tolist()]
        for first, end in zip(first_of_runs, [*first_of_runs[1:], len(rows)], strict=True):
            place = len(self._header) + self._offsets[name] + int(rows[first]) * row_bytes + start
            self._write(data[first * part_bytes : end * part_bytes], place)

    def _write(self, data: memoryview, place: int) -> None:
        while len(data):
            # Linux writes at most 2 GiB at a time, and a disk that is almost full less than it was asked to.
            written = os.pwrite(self._descriptor, data, place)
            data, place = data[written:], place + written
