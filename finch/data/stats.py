"""Statistics of a dataset's rows, read once before weights are loaded: lengths, bad rows, rows without targets, truncated rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torchtune.datasets import PackedDataset, TextCompletionDataset

from finch.base.errors import UserError
from finch.base.log import logger
from finch.data.dataset import Row, Samples, row_lengths
from finch.data.rows import Rows
from finch.distributed.parallel import Parallel
from finch.objectives import IGNORE_INDEX

NUM_SHOWN = 3
_OTHER = "for other reasons"
MAX_REASONS = 10
_CONTENT = ("tokens", "labels", "input_pos")


class BadRows(NamedTuple):
    """Rows that cannot be used for one reason: how many, and the first of them."""

    number: int
    first: list[Row]


@dataclass
class DatasetStats:
    """Statistics of one rank's share of the rows, or of all; the shares' sum is the same however rows are divided.

    Attributes:
        num_targets: target tokens.
        num_without_targets: samples that have none.
        max_token: the highest number of a token.
        num_truncated: rows that reach the tokenizer's max_seq_len. One that has just this length counts as well.
        digest: of tokens and labels, and of how often a mixture draws each row, modulo 2^64.
        first_epoch_digest: of the rows that the first epoch draws; all of them without a mixture. More epochs do not change it.
        lengths: of all rows in tokens, sorted. In packs of plain text a row that is split counts once per pack.
        truncated: the first three truncated rows.
        without_targets: the first three samples without targets.
        num_bad: rows that cannot be used; they count nowhere else.
        bad: them by reason, of which ten are told apart.
    """

    num_targets: int = 0
    num_without_targets: int = 0
    num_truncated: int = 0
    max_token: int = 0
    digest: int = 0
    first_epoch_digest: int = 0
    lengths: list[int] = field(default_factory=list)
    truncated: list[Row] = field(default_factory=list)
    without_targets: list[Row] = field(default_factory=list)
    bad: dict[str, BadRows] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        return sum(each.number for each in self.bad.values())

    def add_bad(self, reason: str, rows: BadRows) -> None:
        known = self.bad.get(reason)
        if known is None and len(self.bad) >= MAX_REASONS:
            reason, known = _OTHER, self.bad.get(_OTHER)
        if known is not None:
            rows = BadRows(known.number + rows.number, sorted(known.first + rows.first, key=_by_number)[:NUM_SHOWN])
        self.bad[reason] = rows

    def bad_rows(self, key: str) -> list[str]:
        """A line for each reason; ``key``: of the config."""
        lines = []
        for reason, bad in self.bad.items():
            if bad.number == 1:
                lines.append(f"{key}: {bad.first[0]} cannot be used ({reason}); fix or remove that row")
            else:
                rows = f"{name_rows(bad.first, bad.number)} of {bad.first[0].source}"
                lines.append(f"{key}: {bad.number:,} rows cannot be used ({reason}), {rows}; fix or remove them")
        return lines

    @property
    def num_rows(self) -> int:
        """Rows that can be used, in packs as well."""
        return len(self.lengths)

    @property
    def min_length(self) -> int:
        """Tokens of the shortest row."""
        return self.lengths[0] if self.lengths else 0

    @property
    def median_length(self) -> int:
        """Median tokens of a row; of an even number of rows the lower one."""
        return self.lengths[(len(self.lengths) - 1) // 2] if self.lengths else 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self.lengths[-1] if self.lengths else 0

    def __add__(self, other: DatasetStats) -> DatasetStats:
        total = DatasetStats(
            num_targets=self.num_targets + other.num_targets,
            num_without_targets=self.num_without_targets + other.num_without_targets,
            num_truncated=self.num_truncated + other.num_truncated,
            max_token=max(self.max_token, other.max_token),
            digest=(self.digest + other.digest) % 2**64,
            first_epoch_digest=(self.first_epoch_digest + other.first_epoch_digest) % 2**64,
            lengths=sorted(self.lengths + other.lengths),
            truncated=sorted(self.truncated + other.truncated)[:NUM_SHOWN],
            without_targets=sorted(self.without_targets + other.without_targets)[:NUM_SHOWN],
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
    long = "" if max_seq_len is None else f", or the prompt already reaches tokenizer.max_seq_len={max_seq_len}"
    if stats.num_targets == 0:
        raise UserError(
            f"{samples.key}: none of the {len(samples.rows)} samples of {samples.source} has a target token: none of its turns is learned{long}; "
            "correct the rows, or raise it"
        )
    if stats.num_without_targets:
        logger.warning(
            f"{samples.key}: {stats.num_without_targets} of {len(samples.rows)} samples have no target token: none of their turns is learned{long} "
            f"({name_rows(stats.without_targets, stats.num_without_targets)}); they teach nothing"
        )
    if stats.num_truncated:
        logger.warning(
            f"{samples.key}: {stats.num_truncated} of {stats.num_rows} samples reach tokenizer.max_seq_len={max_seq_len} and are truncated "
            f"there ({name_rows(stats.truncated, stats.num_truncated)}); raise it to keep their ends"
        )
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
    sample_lengths, content = np.zeros(len(samples), np.int32), np.zeros(len(samples), np.int64)
    for index in samples.rows[rank::ranks]:
        try:
            sample = samples.arrays(index)
        except UserError as error:
            # The error of the library, without the sentence about the row that ``Samples`` has put around it.
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            stats.add_bad(samples.reason(index, cause), BadRows(1, [samples.row(index)]))
            continue
        targets = int((sample["labels"][1:] != IGNORE_INDEX).sum())  # nothing predicts the first token
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
        if targets == 0:
            stats.num_without_targets += 1
            if len(stats.without_targets) < NUM_SHOWN:
                stats.without_targets.append(samples.row(index))
        limit = _length_limit(samples.part_of(index)[0], max_seq_len)
        for position, length in enumerate(row_lengths(sample)):
            stats.lengths.append(length)
            if limit is not None and length >= limit:
                stats.num_truncated += 1
                if len(stats.truncated) < NUM_SHOWN:
                    stats.truncated.append(samples.row(index, position))
    samples.lengths, samples.content = torch.from_numpy(sample_lengths), torch.from_numpy(content)
    return stats + DatasetStats()  # sorted, and digests modulo 2^64


def _row_parts(samples: Samples) -> list[Rows]:
    return [data for data, _ in samples.parts if isinstance(data, Rows)]


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


def row_with_most_answers(samples: Samples) -> int:
    """The index of the row with most answers, of those in the first file or data set of rows."""
    data = samples.parts[0][0]
    is_known = isinstance(data, Rows) and data.tokenized is not None
    return data.tokenized.most_answers() if is_known else samples.rows[0]


def rows_with_doubled_ends(samples: Samples, tokenizer: Any) -> int:
    """Rows of plain text that begin with BOS or end with EOS already, to which the tokenizer adds another."""
    is_text = any(data.row_format.format == "text" and data.tokenized for data in _row_parts(samples))
    bos, eos = getattr(tokenizer, "bos_id", None), getattr(tokenizer, "eos_id", None)
    if not is_text or samples.packed:
        return 0
    tokens = (samples.arrays(index)["tokens"] for index in samples.rows)
    return sum(
        bool((each[:2] == [bos, bos]).all() or (each[-2:] == [eos, eos]).all()) for each in tokens if len(each) > 1
    )


def empty_texts(samples: Samples) -> list[Row]:
    """The rows with an empty text, of those in files of rows."""
    parts = ((index, *samples.part_of(index)) for index in samples.rows)
    found = [samples.row(index) for index, data, local, _ in parts if isinstance(data, Rows) and data.is_empty(local)]
    return sorted(found, key=_by_number)


def _by_number(row: Row) -> tuple[str, int]:
    return row.source, row.number


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
