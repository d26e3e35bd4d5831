"""Which requests share a batch. It depends on the requests and the limits alone, so that a continued evaluation has the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Requests that one row of a batch answers.

    Attributes:
        indices: of the requests. Of log-likelihoods they have all tokens but the last in common.
        length: tokens that the model reads, or reads and generates.
        scored: tokens at the end whose logits are needed.
    """

    indices: list[int]
    length: int
    scored: int = 1


@dataclass(frozen=True)
class Limits:
    """Of a batch. None: no limit.

    Attributes:
        rows: how many.
        tokens: how many, padding included.
        bytes: of what :func:`form_batches` is given the size of.
    """

    rows: int
    tokens: int | None = None
    bytes: int | None = None


def group_rows(requests: Sequence[tuple[list[int], list[int]]], max_length: int) -> list[Row]:
    """Rows for log-likelihoods, the longest first.

    Args:
        requests: tokens of the context and of the continuation.
        max_length: tokens of the model's context; longer requests lose their beginning.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        groups.setdefault((*context, *continuation[:-1]), []).append(index)
    return [
        Row(indices, min(len(tokens), max_length), max(len(requests[index][1]) for index in indices))
        for tokens, indices in sorted(groups.items(), key=lambda group: (-len(group[0]), group[0]))
    ]


def logits_to_keep(rows: Sequence[Row]) -> int:
    """How many positions at the end of the batch, padded on the right, hold all scored tokens."""
    longest = max(row.length for row in rows)
    return max(longest - row.length + row.scored for row in rows)


def form_batches(rows: Sequence[Row], limits: Limits, size: Callable[[Sequence[Row]], int]) -> Iterator[list[Row]]:
    """Splits rows, the longest first, into batches as large as the limits allow; a row alone is always a batch.

    Args:
        size: bytes that a batch takes.
    """
    batch: list[Row] = []
    for row in rows:
        larger = [*batch, row]
        is_too_large = (
            len(larger) > limits.rows
            or (limits.tokens is not None and len(larger) * larger[0].length > limits.tokens)
            or (limits.bytes is not None and size(larger) > limits.bytes)
        )
        if batch and is_too_large:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
