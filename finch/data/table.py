"""Rows of local files as they are: each row of JSON or CSV the text of a JSON object, of parquet and arrow the file's own columns."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow

from finch.base.errors import UserError
from finch.data.cache import cached, content_hash, remembered
from finch.data.row_files import read_batches, read_texts

_BATCH = 1000
_SCHEMA = pyarrow.schema([("row", pyarrow.large_string())])


class FileRows:
    """The rows of one local file, memory-mapped, decoded on access. Raises UserError if the file cannot be read."""

    def __init__(self, file: Path, source: str) -> None:
        self.file, self._is_text = file, source in ("json", "csv")
        # Such a file can be mapped as it is; the others are decoded once, into the cache.
        if source == "arrow":
            self._table = pyarrow.Table.from_batches(read_batches(file, source))
            self.key = [source, *content_hash(file)]
        else:
            self.key = [source, file.suffix.lower() == ".gz", *content_hash(file)]
            self._table = cached(["rows", *self.key], lambda: _batches(file, source), str(file))

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._is_text:
            return json.loads(self._table.column(0)[index].as_py())
        return {name: self._table.column(name)[index].as_py() for name in self._table.column_names}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=_BATCH):  # many times as fast as row by row
            yield from map(json.loads, batch.column(0).to_pylist()) if self._is_text else batch.to_pylist()

    @functools.cached_property
    def column_names(self) -> list[str]:
        if not self._is_text:
            return list(self._table.column_names)
        # Rows of JSON need not have the same fields, and to read all of them for their names takes long.
        names = (name for row in self for name in row)
        return remembered(["columns", *self.key], lambda: list(dict.fromkeys(names)), str(self.file))


class Table:
    """Rows of files, or of one data set of the hub.

    Args:
        parts: the rows of each file, one after the other.
        indices: which of them, in this order; None: all.
    """

    def __init__(self, parts: Sequence[FileRows | datasets.Dataset], indices: Any = None) -> None:
        self.parts, self.indices = parts, indices
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self.indices is None else len(self.indices)

    def __getitem__(self, index: int | str) -> Any:
        """A row, or of each row the field of that name, None where a row lacks it."""
        if isinstance(index, str):
            return [row.get(index) for row in self]
        part, local_index = self._place(index)
        return self.parts[part][local_index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.chain(*self.parts) if self.indices is None else map(self.__getitem__, range(len(self)))

    @property
    def key(self) -> list[Any]:
        """All that the rows depend on."""
        parts = [part.key if isinstance(part, FileRows) else part._fingerprint for part in self.parts]
        return [parts, None if self.indices is None else hashlib.blake2b(self.indices.tobytes()).hexdigest()]

    @property
    def column_names(self) -> list[str]:
        """The columns of all rows, those that are not selected included."""
        return list(dict.fromkeys(name for part in self.parts for name in part.column_names))

    def select(self, indices: Iterable[int]) -> Table:
        chosen = numpy.fromiter(indices, numpy.int64)
        return Table(self.parts, chosen if self.indices is None else self.indices[chosen])

    def filter(self, is_kept: Callable[[dict[str, Any]], bool]) -> Table:
        return self.select(index for index, row in enumerate(self) if is_kept(row))

    def origin(self, index: int) -> tuple[str | None, int]:
        """The file of a row, where there are several, and the row's number there or in its split, from 1."""
        part, local_index = self._place(index)
        return str(self.parts[part].file) if len(self.parts) > 1 else None, local_index + 1

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = index if self.indices is None else int(self.indices[index])
        # To the right, so that a part without rows, which ends where the one before it does, is passed over.
        part = bisect.bisect_right(self._ends, row)
        return part, row - (self._ends[part - 1] if part else 0)


def read_table(files: Sequence[Path], source: str, split: str = "train") -> Table:
    """The rows of local files, or a part of them such as ``train[:400]``. Raises UserError for a file that cannot be read, and another split."""
    table = Table([FileRows(file, source) for file in files])
    if split == "train":
        return table
    try:
        chosen = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(table)})
    except (AssertionError, ValueError) as error:
        raise UserError(f"dataset.split={split}: {error}; a file has the split train, such as train[:400]") from error
    return table.select(row for each in chosen for row in range(len(table))[each.from_ : each.to])


def _batches(file: Path, source: str) -> Iterator[pyarrow.RecordBatch]:
    if source == "parquet":
        yield from read_batches(file, source)
        return
    rows = read_texts(file, source)
    texts: list[str] | None = []  # an empty batch first, so that there is one
    while texts is not None:
        yield pyarrow.record_batch([pyarrow.array(texts, _SCHEMA.types[0])], schema=_SCHEMA)
        texts = list(itertools.islice(rows, _BATCH)) or None
