"""A dataset of torchtune's in which reading a row fails, hangs or takes time: `dataset._component_=helpers.acting_rows.dataset`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torchtune.datasets import instruct_dataset


class ActingRows:
    def __init__(self, rows: Any, fails_at: int | None, hangs_at: int | None) -> None:
        self.rows, self.fails_at, self.hangs_at, self.num_reads = rows, fails_at, hangs_at, 0
        self.is_on_last_rank = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        self.slow_file = Path(os.environ.get("SLOW_ROWS", "absent"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        if self.is_on_last_rank and index == self.fails_at:
            raise KeyError("messages")
        if self.is_on_last_rank and self.num_reads == self.hangs_at:
            wait_for_a_dead_disk()
        if self.slow_file.exists():
            time.sleep(float(self.slow_file.read_text()))
        return self.rows[index]


def wait_for_a_dead_disk() -> None:
    time.sleep(1000)


def dataset(tokenizer: Any, fails_at: int | None = None, hangs_at: int | None = None, **arguments: Any) -> ActingRows:
    """A row takes the seconds that the file SLOW_ROWS holds, as long as it exists.

    Args:
        fails_at: index of a row that the last rank cannot read.
        hangs_at: which of its reads does not return on the last rank, from 1.
    """
    return ActingRows(instruct_dataset(tokenizer, **arguments), fails_at, hangs_at)
