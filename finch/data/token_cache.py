"""Tokenized rows in an arrow file: made once, in batches, and mapped by every process that reads the same rows with the same tokenizer.

The file lies in the datasets library's cache, under a fingerprint of all that its content depends on. One process writes it under a lock, the
others of a node wait for it. What is damaged or half written is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from filelock import FileLock, Timeout

from finch.data.row_files import code_digest
from finch.distributed import watchdog
from finch.errors import UserError
from finch.files import atomic_file, write_text
from finch.log import logger
from finch.objectives import IGNORE_INDEX
from finch.progress import Progress

Int64: TypeAlias = npt.NDArray[np.int64]
BATCH_ROWS = 512
POLL_S = 2.0
_SCHEMA = pa.schema(
    {
        "tokens": pa.list_(pa.int32()),
        "targets": pa.list_(pa.int32()),  # starts and ends of the parts that are targets
        "error": pa.string(),
        "unused": pa.list_(pa.string()),
        "is_empty": pa.bool_(),
    }
)


class TokenizedRow(NamedTuple):
    """A row that has been read.

    Attributes:
        tokens: ids; none of a row that cannot be used.
        labels: of the same length; -100 is no target.
        error: why the row cannot be used.
        unused: its fields that training does not see.
        is_empty: whether one of its texts is empty.
    """

    tokens: Sequence[int] = ()
    labels: Sequence[int] | Int64 = ()
    error: str | None = None
    unused: Sequence[str] = ()
    is_empty: bool = False


class TokenizedRows:
    """Rows of tokens and labels by their index, mapped from a file.

    Args:
        table: of the module's columns.
    """

    def __init__(self, table: pa.Table) -> None:
        self._tokens, self._targets, self._errors, self._unused, self._empty = map(table.column, _SCHEMA.names)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """``tokens`` and ``labels``. Raises UserError for a row that cannot be used."""
        return {name: values.tolist() for name, values in self.arrays(index).items()}

    def arrays(self, index: int) -> dict[str, Int64]:
        """``tokens`` and ``labels``, [tokens] int64. Raises UserError for a row that cannot be used."""
        if (error := self.error(index)) is not None:
            raise UserError(error)
        tokens = self._tokens[index].values.to_numpy().astype(np.int64)
        labels = np.full(len(tokens), IGNORE_INDEX)
        for start, stop in self._targets[index].values.to_numpy().reshape(-1, 2):
            labels[start:stop] = tokens[start:stop]
        return {"tokens": tokens, "labels": labels}

    def error(self, index: int) -> str | None:
        """Why a row cannot be used."""
        reason: str | None = self._errors[index].as_py()
        return reason

    def is_empty(self, index: int) -> bool:
        return bool(self._empty[index].as_py())

    def most_answers(self) -> int:
        """The first row with most parts that are targets."""
        return int(np.argmax(pa.compute.list_value_length(self._targets).to_numpy()))

    def unused(self, indices: Iterable[int]) -> Counter[str]:
        """How many of these rows have each field that training does not see."""
        return Counter(name for index in indices for name in self._unused[index].as_py())


def tokenized_rows(
    batches: Callable[[int], Iterator[list[TokenizedRow]]], num_rows: int, settings: Sequence[Any], title: str
) -> TokenizedRows:
    """The rows of an earlier call with equal ``settings``, or those of ``batches``, which are kept.

    Args:
        batches: the rows in their order, so many at a time.
        settings: all that the rows depend on, as JSON values.
    """
    content = json.dumps([code_digest(), num_rows, *settings], default=str)
    name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    file = Path(datasets.config.HF_DATASETS_CACHE) / "finch" / f"rows-{name}.arrow"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(FileLock(f"{file}.lock"), title):
            if (found := _read(file, num_rows)) is None:
                with atomic_file(file) as partial, pa.OSFile(str(partial), "wb") as sink:
                    _write(sink, batches, num_rows, title)
                write_text(_digest_file(file), _digest(file))
                found = _read(file, num_rows)
        if found is not None:
            return TokenizedRows(found)
        reason = "what was written cannot be read"
    except OSError as error:
        reason = str(error.strerror or error)
    logger.warning(
        f"{title}: tokenized rows cannot be kept in {file.parent} ({reason}); they are kept in memory, and made again at each start; "
        "HF_DATASETS_CACHE names another folder"
    )
    sink = pa.BufferOutputStream()
    _write(sink, batches, num_rows, title)
    return TokenizedRows(pa.ipc.open_stream(sink.getvalue()).read_all())


class _locked:
    """Holds a lock; a process that waits for it says so, and that it lives."""

    def __init__(self, lock: FileLock, title: str) -> None:
        self._lock, self._title = lock, title

    def __enter__(self) -> None:
        is_said = False
        while True:
            try:
                self._lock.acquire(POLL_S)
                return
            except Timeout:
                watchdog.heartbeat()
                if not is_said:
                    logger.info(f"{self._title}: waits for another process, which tokenizes the same rows")
                is_said = True

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _write(sink: Any, batches: Callable[[int], Iterator[list[TokenizedRow]]], num_rows: int, title: str) -> None:
    progress = Progress(num_rows, is_shown=num_rows > BATCH_ROWS, leave=False)
    progress.set_title(f"{title}: tokenized")
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for rows in batches(BATCH_ROWS):
            columns = [
                [row.tokens for row in rows],
                [_runs(row.labels) for row in rows],
                [None if row.error is None else _encodable(row.error) for row in rows],
                [list(map(_encodable, row.unused)) for row in rows],
                [row.is_empty for row in rows],
            ]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
            progress.advance(len(rows))
            watchdog.heartbeat()
    progress.close()


def _encodable(text: str) -> str:
    """Half a surrogate pair, which names of fields can have, is no character of UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _runs(labels: Sequence[int] | Int64) -> npt.NDArray[np.int32]:
    """Starts and ends of the parts that are targets."""
    is_target = np.zeros(len(labels) + 2, dtype=bool)
    is_target[1:-1] = np.asarray(labels, dtype=np.int64) != IGNORE_INDEX
    return np.flatnonzero(is_target[1:] != is_target[:-1]).astype(np.int32)


def _read(file: Path, num_rows: int) -> pa.Table | None:
    """The table of a file; None: there is none, or not as it was written."""
    try:
        if _digest_file(file).read_text(encoding="utf-8") != _digest(file):
            return None
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    except (OSError, ValueError):  # pyarrow's errors are ValueErrors
        return None
    return table if table.schema.equals(_SCHEMA) and table.num_rows == num_rows else None


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".digest")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()
