"""Tokenized rows in an arrow file: made once, in batches, and mapped by every process that reads the same rows with the same tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from finch.base.errors import UserError
from finch.base.progress import Progress
from finch.data.cache import cached
from finch.distributed import watchdog
from finch.objectives import IGNORE_INDEX

Int64: TypeAlias = npt.NDArray[np.int64]
BATCH_ROWS = 512
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

    tokens: Sequence[int] | Int64 = ()
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
        self._tokens, self._targets, errors, self._unused, empty = map(table.column, _SCHEMA.names)
        self._empty = set(pa.compute.indices_nonzero(empty).to_pylist())
        bad = pa.compute.indices_nonzero(errors.is_valid()).to_pylist()
        self._errors: dict[int, str] = {index: errors[index].as_py() for index in bad}

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """``tokens`` and ``labels``. Raises UserError for a row that cannot be used."""
        return {name: values.tolist() for name, values in self.arrays(index).items()}

    def arrays(self, index: int) -> dict[str, Int64]:
        """``tokens`` and ``labels``, [tokens] int64. Raises UserError for a row that cannot be used."""
        if (error := self.error(index)) is not None:
            raise UserError(error)
        # A copy as int64, since torch takes labels of no other type, and the file is mapped read-only.
        tokens = self._tokens[index].values.to_numpy().astype(np.int64)
        labels = np.full(len(tokens), IGNORE_INDEX)
        for start, stop in self._targets[index].values.to_numpy().reshape(-1, 2):
            labels[start:stop] = tokens[start:stop]
        return {"tokens": tokens, "labels": labels}

    def error(self, index: int) -> str | None:
        """Why a row cannot be used."""
        return self._errors.get(index)

    def is_empty(self, index: int) -> bool:
        return index in self._empty

    def most_answers(self) -> int:
        """The first row with most parts that are targets."""
        return int(np.argmax(pa.compute.list_value_length(self._targets).to_numpy()))

    def unused(self) -> Counter[str]:
        """How many rows have each field that training does not see."""
        found = pa.compute.list_flatten(self._unused).value_counts().to_pylist()
        return Counter({each["values"]: each["counts"] for each in found})


def tokenized_rows(
    batches: Callable[[int], Iterator[list[TokenizedRow]]], num_rows: int, settings: Sequence[Any], title: str
) -> TokenizedRows:
    """The rows of an earlier call with equal ``settings``, or those of ``batches``, which are kept.

    Args:
        batches: the rows in their order, so many at a time.
        settings: all that the rows depend on.
    """
    return TokenizedRows(cached(["tokens", *settings], lambda: _record_batches(batches, num_rows, title), title))


def _record_batches(
    batches: Callable[[int], Iterator[list[TokenizedRow]]], num_rows: int, title: str
) -> Iterator[pa.RecordBatch]:
    progress = Progress(num_rows, is_shown=num_rows > BATCH_ROWS, leave=False)
    progress.set_title(f"{title}: tokenized")
    for rows in batches(BATCH_ROWS):
        columns = [
            _lists([row.tokens for row in rows]),
            _lists([_runs(row.labels) for row in rows]),
            [None if row.error is None else _encodable(row.error) for row in rows],
            [list(map(_encodable, row.unused)) for row in rows],
            [row.is_empty for row in rows],
        ]
        yield pa.record_batch(columns, schema=_SCHEMA)
        progress.advance(len(rows))
        watchdog.heartbeat()
    progress.close()


def _lists(rows: Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]]) -> pa.ListArray:
    """Lists of integers; pyarrow would convert them one by one."""
    ends = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, np.concatenate(rows, dtype=np.int32, casting="unsafe"))


def _encodable(text: str) -> str:
    """A text that UTF-8 can hold: half a surrogate pair, which names of fields can have, is none of its characters."""
    return text.encode("utf-8", "replace").decode()


def _runs(labels: Sequence[int] | Int64) -> npt.NDArray[np.int32]:
    """Starts and ends of the parts that are targets."""
    # No target before the first and after the last label, so that a part at either end has a start and an end.
    is_target = np.zeros(len(labels) + 2, dtype=bool)
    is_target[1:-1] = np.asarray(labels, dtype=np.int64) != IGNORE_INDEX
    return np.flatnonzero(is_target[1:] != is_target[:-1]).astype(np.int32)
