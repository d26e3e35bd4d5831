"""A safetensors file that is written in parts: the header first, then rows of its tensors in any order.

``safetensors.torch.save_file`` needs all tensors of a file in memory. The file is the same, byte for byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from finch.weights.files import SAFETENSORS_METADATA

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # in file order
_ALIGNMENT = 8  # bytes


class SafetensorsWriter:
    """Writes a new file; a context manager.

    Args:
        path: the file, which must not exist.
        tensors: of the file's shapes and dtypes, by name; may be on the meta device.

    Raises:
        OSError: the file cannot be written; from ``write_rows`` as well.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self._path, dtypes = tensors, path, list(_DTYPES)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": SAFETENSORS_METADATA}
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (dtypes.index(item[1].dtype), item[0])):
            start, end = end, end + tensor.nbytes
            self._offsets[name] = start
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text = text.ljust(math.ceil(len(text) / _ALIGNMENT) * _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text

    def __enter__(self) -> SafetensorsWriter:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(memoryview(self._header), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write_rows(self, name: str, rows: torch.Tensor, columns: tuple[slice, ...], values: torch.Tensor) -> None:
        """Writes a part of a tensor.

        Args:
            name: the tensor's.
            rows: [n] numbers of its rows, in any order.
            columns: a slice for each of its dimensions but the first.
            values: [n, ...] of those rows and columns, on the CPU; cast to the file's dtype.
        """
        tensor = self._tensors[name]
        rows, order = rows.sort()
        if not torch.equal(order, torch.arange(len(order))):
            values = values[order]
        data = values.to(tensor.dtype).contiguous().flatten().view(torch.uint8).numpy().data
        row_bytes = tensor[0].nbytes
        # Within a row, the part is contiguous if it has one dimension, or all columns.
        start = columns[0].start * tensor[0, 0].nbytes if columns else 0
        part_bytes = len(data) // max(1, len(rows))
        is_next = rows.diff() == 1 if part_bytes == row_bytes else torch.zeros(max(0, len(rows) - 1), dtype=torch.bool)
        first_of_runs = [0, *((~is_next).nonzero().squeeze(1) + 1).tolist()]
        for first, end in zip(first_of_runs, [*first_of_runs[1:], len(rows)], strict=True):
            place = len(self._header) + self._offsets[name] + int(rows[first]) * row_bytes + start
            self._write(data[first * part_bytes : end * part_bytes], place)

    def _write(self, data: memoryview, place: int) -> None:
        while len(data):
            written = os.pwrite(self._descriptor, data, place)
            data, place = data[written:], place + written
