"""torchrun's launcher inside of a command: the cores of each rank, and what a rank that fails ends with."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def prepare(local_ranks: int) -> None:
    """Gives each rank its share of the cores, and silences the launcher's summary: a rank prints its own error."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local_ranks)))
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def first_failure(error: ChildFailedError) -> tuple[int, int]:
    """The first rank that failed, and its exit code as a shell has it: 128 + the signal's number after a signal."""
    rank, failure = error.get_first_failure()
    return rank, failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
