"""Statistics of a dataset's rows, read once before weights are loaded: lengths, bad rows, rows without targets, truncated rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torchtune.datasets import PackedDataset, TextCompletionDataset

from finch.base.errors import UserError
from finch.base.log import logger
from finch.data.dataset import Row, Samples, row_lengths
from finch.data.prompts import stop_tokens
from finch.data.rows import Rows
from finch.distributed.parallel import Parallel
from finch.objectives import IGNORE_INDEX

NUM_SHOWN = 3
_OTHER = "for other reasons"
MAX_REASONS = 10
_CONTENT = ("tokens", "labels", "input_pos")


@dataclass
class RowCount:
    """How many rows something holds for, and the first three of them."""

    number: int = 0
    first: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.number += 1
        if len(self.first) < NUM_SHOWN:
            self.first.append(row)

    def __add__(self, other: RowCount) -> RowCount:
        first = sorted(self.first + other.first, key=lambda row: (row.source, row.number))
        return RowCount(self.number + other.number, first[:NUM_SHOWN])

    def __str__(self) -> str:
        return name_rows(self.first, self.number)


@dataclass
class DatasetStats:
    """Statistics of one rank's share of the rows, or of all; the shares' sum is the same however rows are divided.

    Attributes:
        num_targets: target tokens.
        max_token: the highest number of a token.
        digest: of tokens and labels, and of how often a mixture draws each row, modulo 2^64.
        first_epoch_digest: of the rows that the first epoch draws; all of them without a mixture. More epochs do not change it.
        lengths: of all rows in tokens, sorted. In packs of plain text a row that is split counts once per pack.
        truncated: rows that reach the tokenizer's max_seq_len. One that has just this length counts as well.
        without_targets: samples that have none.
        empty: rows with an empty text, of those in files of rows.
        doubled: samples whose texts have what is added to them: they begin with BOS twice, learn the end of a turn twice, or close an answer's header.
        unasked: conversations with an answer that is learned after other tokens than those that generation starts from.
        num_bad: rows that cannot be used; they count nowhere else.
        bad: them by reason, of which ten are told apart.
    """

    num_targets: int = 0
    max_token: int = 0
    digest: int = 0
    first_epoch_digest: int = 0
    lengths: list[int] = field(default_factory=list)
    truncated: RowCount = field(default_factory=RowCount)
    without_targets: RowCount = field(default_factory=RowCount)
    empty: RowCount = field(default_factory=RowCount)
    doubled: RowCount = field(default_factory=RowCount)
    unasked: RowCount = field(default_factory=RowCount)
    bad: dict[str, RowCount] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        return sum(each.number for each in self.bad.values())

    def add_bad(self, reason: str, rows: RowCount) -> None:
        if reason not in self.bad and len(self.bad) >= MAX_REASONS:
            reason = _OTHER
        self.bad[reason] = self.bad.get(reason, RowCount()) + rows

    def notes(self, max_seq_len: int | None) -> list[str]:
        """What is unusual of the rows, a line each; ``max_seq_len``: the tokenizer's."""
        kinds = {
            f"reach tokenizer.max_seq_len={max_seq_len} and are truncated there": (
                self.truncated,
                "raise it to keep their ends",
            ),
            f"have no target token: none of their turns is learned{_too_long(max_seq_len)}": (
                self.without_targets,
                "they teach nothing",
            ),
            "have an empty text": (self.empty, "the model learns to answer or to write it"),
            "have BOS, the end of a turn or an answer's header in their texts": (
                self.doubled,
                "write them without what is added",
            ),
            "learn an answer after other tokens than the model is asked with": (
                self.unasked,
                "set tokenizer.thinking=True where they think, end a row with each answer, begin no answer with white space",
            ),
        }
        return [
            f"{rows.number:,} of {self.num_rows:,} rows {what} ({rows}); {remedy}"
            for what, (rows, remedy) in kinds.items()
            if rows.number
        ]

    def bad_rows(self, key: str) -> list[str]:
        """A line for each reason; ``key``: of the config."""
        lines = []
        for reason, bad in self.bad.items():
            if bad.number == 1:
                lines.append(f"{key}: {bad.first[0]} cannot be used ({reason}); fix or remove that row")
            else:
                lines.append(
                    f"{key}: {bad.number:,} rows cannot be used ({reason}), {bad} of {bad.first[0].source}; fix or remove them"
                )
        return lines

    @property
    def num_rows(self) -> int:
        """Rows that can be used, in packs as well."""
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self.lengths[-1] if self.lengths else 0

    def __add__(self, other: DatasetStats) -> DatasetStats:
        total = DatasetStats(
            num_targets=self.num_targets + other.num_targets,
            max_token=max(self.max_token, other.max_token),
            digest=(self.digest + other.digest) % 2**64,
            first_epoch_digest=(self.first_epoch_digest + other.first_epoch_digest) % 2**64,
            lengths=sorted(self.lengths + other.lengths),
            truncated=self.truncated + other.truncated,
            without_targets=self.without_targets + other.without_targets,
            empty=self.empty + other.empty,
            doubled=self.doubled + other.doubled,
            unasked=self.unasked + other.unasked,
        )
        for reason, rows in (*self.bad.items(), *other.bad.items()):
            total.add_bad(reason, rows)
        return total


Fit: TypeAlias = Callable[[str, DatasetStats | None], str | None]
"""Whether a model fits rows, by their config key and statistics, None where they have not been read: raises UserError, or returns a warning."""


def validate_dataset(
    samples: Samples, max_seq_len: int | None, parallel: Parallel, fit: Fit | None = None
) -> DatasetStats:
    """Reads each of ``samples.rows`` once, divided over the ranks, warns of what is unusual, and keeps the lengths in ``samples``.

    ``max_seq_len``: the tokenizer's; None: no limit. ``fit``: checks that the model can take the rows. Raises UserError for a row that cannot be read or tokenized, and if no row has a target
    token.
    """
    try:
        share: DatasetStats | UserError = collect_stats(
            samples, parallel.data_parallel_rank, parallel.data_parallel_size, max_seq_len
        )
    except UserError as error:
        share = error  # raised on every rank, so that none waits for this one
    stats = DatasetStats()
    for each in parallel.gather(share):
        if isinstance(each, UserError):
            raise each
        stats += each
    if stats.bad:
        first, *others = stats.bad_rows(samples.key)
        raise UserError(first + ("; `finch check` lists those with other faults" if others else ""))
    assert samples.lengths is not None
    assert samples.content is not None
    samples.lengths = parallel.all_reduce_sum_(samples.lengths.to(parallel.device)).cpu()  # each row is in one share
    samples.content = parallel.all_reduce_sum_(samples.content.to(parallel.device)).cpu()
    if stats.num_targets == 0:
        raise UserError(
            f"{samples.key}: none of the {len(samples.rows)} samples of {samples.source} has a target token: none of its turns is learned"
            f"{_too_long(max_seq_len)}; correct the rows, or raise it"
        )
    for note in stats.notes(max_seq_len):
        logger.warning(f"{samples.key}: {note}")
    if fit is not None and (warning := fit(samples.key, stats)):
        logger.warning(warning)
    if unused := describe_unused(samples):
        logger.info(f"{samples.key}: fields that training does not use: {unused}")
    logger.info(f"{samples.key}: {stats.num_targets:,} target tokens, longest sample {stats.max_length} tokens")
    return stats


def collect_stats(samples: Samples, rank: int, ranks: int, max_seq_len: int | None = None) -> DatasetStats:
    """Statistics of one rank's share of the rows, whose lengths and hashes are kept in ``samples``.

    Rows that cannot be read or tokenized are listed in the statistics.
    """
    stats = DatasetStats()
    for data in _row_parts(samples):
        data.tokenize(samples.key)
    tokenizers = [data.tokenizer for data in _row_parts(samples)]
    bounds = [(getattr(each, "bos_id", None), *stop_tokens(each)) for each in tokenizers]
    ends = [each for group in bounds for each in group if each is not None]
    chat = [each for each in tokenizers if hasattr(each, "headers")]
    blanks = [each[0] for own in chat for text in ("\n", "\n\n", " ") if len(each := own.encode(text)) == 1]
    headers = [[each for each in header if each not in blanks] for own in chat for header in own.headers]
    # A text has the header without the empty thinking that a hybrid template adds.
    openings = [header[:stop] for header in headers for stop in range(1, len(header) + 1)]
    sample_lengths, content = np.zeros(len(samples), np.int32), np.zeros(len(samples), np.int64)
    for index in samples.rows[rank::ranks]:
        data, local_index, _ = samples.part_of(index)
        try:
            sample = samples.arrays(index)
        except UserError as error:
            # The error of the library, without the sentence about the row that ``Samples`` has put around it.
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            stats.add_bad(samples.reason(index, cause), RowCount(1, [samples.row(index)]))
            continue
        is_target = sample["labels"][1:] != IGNORE_INDEX  # nothing predicts the first token
        targets = int(is_target.sum())
        stats.num_targets += targets
        stats.max_token = max(stats.max_token, int(sample["tokens"].max(initial=0)))
        sample_lengths[index] = len(sample["labels"])
        parts = (sample[key].tobytes() for key in _CONTENT if key in sample)
        content[index] = xxhash.xxh3_64_intdigest(b"".join(parts)) >> 1  # fits in int64
        draws = 1 if samples.draws is None else int(samples.draws[index])
        # With its index, since a sum does not see the order of rows, which is part of the run.
        row_digest = _digest(index if samples.draws is None else (index, draws), sample)
        stats.digest += row_digest
        stats.first_epoch_digest += row_digest if draws > 0 else 0
        limit, lengths = _length_limit(data, max_seq_len), row_lengths(sample)
        stats.lengths += lengths
        for position, length in enumerate(lengths):
            if limit is not None and length >= limit:
                stats.truncated.add(samples.row(index, position))
        is_doubled = _is_doubled(sample, ends, blanks, openings)
        is_empty = isinstance(data, Rows) and data.is_empty(local_index)
        found = (stats.without_targets, targets == 0), (stats.empty, is_empty), (stats.doubled, is_doubled)
        for rows, is_so in (*found, (stats.unasked, _is_unasked(data, sample))):
            if is_so:
                rows.add(samples.row(index))
    samples.lengths, samples.content = torch.from_numpy(sample_lengths), torch.from_numpy(content)
    return stats + DatasetStats()  # sorted, and digests modulo 2^64


def _is_doubled(sample: Mapping[str, Any], ends: list[Any], blanks: list[int], openings: list[list[int]]) -> bool:
    """Whether texts have what is added to them, blanks aside: BOS or a learned end of a turn twice in a row, or an answer's header at their end."""
    shown = ~np.isin(sample["tokens"], blanks)
    tokens, is_target = sample["tokens"][shown], (sample["labels"] != IGNORE_INDEX)[shown]
    is_end = np.isin(tokens, ends)
    repeated = np.flatnonzero(is_end[1:] & (tokens[1:] == tokens[:-1])).tolist()  # few
    if any(is_target[each + 1] or each == 0 for each in repeated):
        return True
    closed = np.flatnonzero(is_end & ~is_target).tolist()
    return any(tokens[:end][-len(each) :].tolist() == each for end in closed for each in openings)


def _is_unasked(data: Any, sample: Mapping[str, Any]) -> bool:
    """Whether an answer is learned after other tokens than those that generation starts from: another header, or one that a token joins to the answer."""
    rows = getattr(data, "ds", data)  # of packs their rows
    headers = getattr(rows.tokenizer, "headers", ()) if isinstance(rows, Rows) and rows.learns_answers else ()
    tokens, is_target = sample["tokens"], sample["labels"] != IGNORE_INDEX
    starts = (np.flatnonzero(is_target[1:] & ~is_target[:-1]) + 1).tolist() if headers else []
    return any(all(tuple(tokens[:start][-len(each) :]) != each for each in headers) for start in starts)


def _row_parts(samples: Samples) -> list[Rows]:
    parts = (getattr(data, "ds", data) for data, _ in samples.parts)  # of packs their rows
    return [data for data in parts if isinstance(data, Rows)]


def unused_fields(samples: Samples) -> Counter[str]:
    """The fields that training does not see, with how many rows have each, of rows that :func:`collect_stats` has read in batches."""
    return sum((data.tokenized.unused() for data in _row_parts(samples) if data.tokenized), Counter())


def describe_unused(samples: Samples) -> str | None:
    """The unused fields in words: ``id (60 rows), messages[].name (3)``."""
    found = unused_fields(samples).most_common()
    return ", ".join(f"{name} ({number:,}{' rows' if not index else ''})" for index, (name, number) in enumerate(found))


def describe_trained(validation: Samples, trained: Samples) -> str | None:
    """How many validation rows are training rows too, and what helps; None: none is known to be."""
    if validation.content is None or trained.content is None:
        return None
    read = validation.content[validation.content != 0]
    if not (known := int(torch.isin(read, trained.content).sum())):
        return None
    remedy = "dataset.split_by=content keeps such rows of a file together; or remove them"
    return f"{known:,} of {len(read):,} validation rows are training rows too; {remedy}"


def _too_long(max_seq_len: int | None) -> str:
    return "" if max_seq_len is None else f", or the prompt already reaches tokenizer.max_seq_len={max_seq_len}"


def name_rows(rows: Sequence[Row], total: int) -> str:
    """The first of ``total`` rows by their numbers: ``rows 3, 7, 12, ...``."""
    if len({row.source for row in rows}) == 1:
        names = ("row " if total == 1 else "rows ") + ", ".join(str(row.number) for row in rows)
    else:
        names = ", ".join(map(str, rows))
    return names if total == len(rows) else f"{names}, ..."


def _length_limit(data: Any, max_seq_len: int | None) -> int | None:
    """The length that truncated rows of a dataset have; None: none is truncated."""
    if max_seq_len is None or (isinstance(data, PackedDataset) and data.split_across_pack):
        return None
    inner = data.ds if isinstance(data, PackedDataset) else data
    # torchtune's class cuts plain text one token earlier than everything else.
    return max_seq_len - 1 if isinstance(inner, TextCompletionDataset) else max_seq_len


def _digest(position: int | tuple[int, int], sample: Mapping[str, Any]) -> int:
    """The digest of a row and its index, or its index and its draws."""
    row = hashlib.blake2b(str(position).encode(), digest_size=8)
    for key in _CONTENT:
        if key in sample:
            # In one type: the same row may come in another width of integers.
            row.update(sample[key].astype(np.int64).tobytes())
    return int.from_bytes(row.digest(), "little")
