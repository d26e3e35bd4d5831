"""The folder that an epoch leaves behind, and the link to the best one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.errors import WriteFailed
from finch.log import logger


def export(write: Callable[[], None], folder: Path, parallel: Parallel) -> bool:
    """Writes an epoch's folder; a collective. Returns whether it could be written; a full disk does not end the run.

    Args:
        write: writes it; called on every rank, since each sends its shards.
        folder: what is written, for the log.
    """
    start = time.perf_counter()
    message = None
    try:
        write()
    except WriteFailed as error:
        message = str(error)
    watchdog.heartbeat()
    message = parallel.gather_all_ranks(message)[0]
    if message is not None:
        logger.warning(f"{folder} could not be written ({message})")
    else:
        logger.info(f"saved {folder} in {time.perf_counter() - start:.1f} s")
    return message is None
