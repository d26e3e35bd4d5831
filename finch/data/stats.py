"""Statistics of a dataset's rows, read once before weights are loaded: bad rows, rows without targets, truncated rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from finch.data.dataset import Samples
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.objectives import IGNORE_INDEX
from finch.torchtune_names import shift_labels


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of one rank's share of the rows, or of all.

    Attributes:
        num_targets: target tokens.
        num_without_targets: rows that have none.
        num_truncated: rows that reach the tokenizer's max_seq_len.
        max_length: of the longest row, in tokens.
        digest: of tokens and labels, and of how often a mixture draws each row; the ranks' shares add up, modulo 2^64, to the
            same number however rows are divided.
        first_epoch_digest: of the rows that the first epoch draws; all of them without a mixture. More epochs do not change it.
    """

    num_targets: int = 0
    num_without_targets: int = 0
    num_truncated: int = 0
    max_length: int = 0
    digest: int = 0
    first_epoch_digest: int = 0

    def __add__(self, other: DatasetStats) -> DatasetStats:
        return DatasetStats(
            self.num_targets + other.num_targets,
            self.num_without_targets + other.num_without_targets,
            self.num_truncated + other.num_truncated,
            max(self.max_length, other.max_length),
            (self.digest + other.digest) % 2**64,
            (self.first_epoch_digest + other.first_epoch_digest) % 2**64,
        )


def validate_dataset(samples: Samples, max_seq_len: int | None, parallel: Parallel) -> DatasetStats:
    """Reads each of ``samples.rows`` once, divided over the ranks, and warns of what is unusual.

    Args:
        max_seq_len: the tokenizer's; None: no limit.

    Raises:
        UserError: a row that cannot be read or tokenized; no row with a target token.
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
    if stats.num_targets == 0:
        raise UserError(
            f"{samples.key}: none of the {len(samples.rows)} samples of {samples.source} has a target token; the prompts alone reach "
            f"tokenizer.max_seq_len={max_seq_len}, raise it"
        )
    if stats.num_without_targets:
        logger.warning(
            f"{samples.key}: {stats.num_without_targets} of {len(samples.rows)} samples have no target token, since the prompt alone reaches "
            f"tokenizer.max_seq_len={max_seq_len}; they teach nothing"
        )
    if stats.num_truncated and not samples.packed:
        logger.warning(
            f"{samples.key}: {stats.num_truncated} of {len(samples.rows)} samples reach tokenizer.max_seq_len={max_seq_len} and are truncated "
            "there; raise it to keep their ends"
        )
    logger.info(f"{samples.key}: {stats.num_targets:,} target tokens, longest sample {stats.max_length} tokens")
    return stats


def collect_stats(samples: Samples, rank: int, ranks: int, max_seq_len: int | None = None) -> DatasetStats:
    """Statistics of one rank's share of the rows.

    Raises:
        UserError: a row that cannot be read or tokenized.
    """
    stats = DatasetStats()
    for index in samples.rows[rank::ranks]:
        sample = samples[index]
        labels = torch.as_tensor(sample["labels"])
        num_targets = int((shift_labels(labels) != IGNORE_INDEX).sum())
        is_truncated = max_seq_len is not None and len(labels) >= max_seq_len
        draws = 1 if samples.draws is None else int(samples.draws[index])
        digest = _digest(index if samples.draws is None else (index, draws), sample)
        first_epoch_digest = digest if draws > 0 else 0
        stats += DatasetStats(
            num_targets, int(num_targets == 0), int(is_truncated), len(labels), digest, first_epoch_digest
        )
    return stats


def _digest(position: int | tuple[int, int], sample: dict[str, Any]) -> int:
    """Of a row and its index, or its index and its draws."""
    row = hashlib.blake2b(str(position).encode(), digest_size=8)
    for key in ("tokens", "labels", "input_pos"):
        if key in sample:
            row.update(torch.as_tensor(sample[key]).to(torch.int64).numpy().tobytes())
    return int.from_bytes(row.digest(), "little")
