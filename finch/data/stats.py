"""A look at every row before any weight is loaded: broken rows, rows without targets, rows cut off."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from finch.data.loading import Samples
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.objectives import IGNORE_INDEX
from finch.torchtune_names import shift_labels


@dataclass(frozen=True)
class DatasetStats:
    """What is known of rows, of one rank's share or of all.

    Attributes:
        targets: target tokens.
        without: rows that have none.
        cut: rows that reach the tokenizer's limit.
        longest: the longest row in tokens.
        digest: of tokens and labels; shares add up, modulo 2^64, to the same number however rows are shared out.
    """

    targets: int = 0
    without: int = 0
    cut: int = 0
    longest: int = 0
    digest: int = 0

    def __add__(self, other: DatasetStats) -> DatasetStats:
        return DatasetStats(
            self.targets + other.targets,
            self.without + other.without,
            self.cut + other.cut,
            max(self.longest, other.longest),
            (self.digest + other.digest) % 2**64,
        )


def validate_dataset(samples: Samples, limit: int | None, parallel: Parallel) -> DatasetStats:
    """Reads every row once, divided over the ranks, and tells what is unusual.

    Args:
        limit: the tokenizer's max_seq_len.

    Raises:
        UserError: a row that cannot be read or tokenized; no row with a target token.
    """
    try:
        mine: DatasetStats | UserError = collect_stats(
            samples, parallel.data_parallel_rank, parallel.data_parallel_size, limit
        )
    except UserError as error:
        mine = error  # told by every rank, so that none waits for this one
    rows = DatasetStats()
    for share in parallel.gather(mine):
        if isinstance(share, UserError):
            raise share
        rows += share
    if rows.targets == 0:
        raise UserError(
            f"{samples.key}: none of the {len(samples)} samples of {samples.source} has a target token; the prompts alone reach tokenizer.max_seq_len={limit}, raise it"
        )
    if rows.without:
        message = (
            f"{samples.key}: {rows.without} of {len(samples)} samples have no target token, since the prompt alone reaches "
            f"tokenizer.max_seq_len={limit}; they teach nothing"
        )
        logger.warning(message)
    if rows.cut and not samples.packed:
        message = f"{samples.key}: {rows.cut} of {len(samples)} samples reach tokenizer.max_seq_len={limit} and are cut off there; raise it to keep their ends"
        logger.warning(message)
    logger.info(f"{samples.key}: {rows.targets:,} target tokens, longest sample {rows.longest} tokens")
    return rows


def collect_stats(samples: Samples, rank: int, ranks: int, limit: int | None = None) -> DatasetStats:
    """One rank's share of the rows.

    Raises:
        UserError: a row that cannot be read or tokenized.
    """
    rows = DatasetStats()
    for index in range(rank, len(samples), ranks):
        sample = samples[index]
        labels = torch.as_tensor(sample["labels"])
        targets = int((shift_labels(labels) != IGNORE_INDEX).sum())
        is_cut = limit is not None and len(labels) >= limit
        rows += DatasetStats(targets, int(targets == 0), int(is_cut), len(labels), _digest(index, sample))
    return rows


def _digest(index: int, sample: dict[str, Any]) -> int:
    row = hashlib.blake2b(str(index).encode(), digest_size=8)
    for key in ("tokens", "labels", "input_pos"):
        if key in sample:
            row.update(torch.as_tensor(sample[key]).to(torch.int64).numpy().tobytes())
    return int.from_bytes(row.digest(), "little")
