"""finch's logger. Rank 0 speaks for all ranks; the others are silent below ERROR."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("finch")


def _is_rank_zero_or_error(record: logging.LogRecord) -> bool:
    return os.environ.get("RANK", "0") == "0" or record.levelno >= logging.ERROR


if not logger.hasHandlers():
    logger.addHandler(logging.StreamHandler())
logger.setLevel(logging.INFO)
logger.addFilter(_is_rank_zero_or_error)
