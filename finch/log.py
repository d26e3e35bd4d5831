"""finch's logger, and what other packages log. Rank 0 speaks for all ranks; the others are silent below ERROR."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("finch")


def quiet_dependencies() -> None:
    """Hides what other packages print in every run and nobody needs; call it before torchtune is imported.

    - torchao's notice that it leaves out its C++ extensions, which finch does not use. Its other warnings stay.
    - torchtune's line about the seed, which the config has.
    - The progress bars of Hugging Face's datasets where stderr is a log file, in which they are one long line.
    """
    for name in ("torchao", "torchtune.utils._logging"):
        logging.getLogger(name).addFilter(_is_worth_reading)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("Skipping import of cpp extensions", "Setting manual seed"))


def _is_rank_zero_or_error(record: logging.LogRecord) -> bool:
    return os.environ.get("RANK", "0") == "0" or record.levelno >= logging.ERROR


class _Formatter(logging.Formatter):
    """Marks warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return mark + super().format(record)


if not logger.hasHandlers():
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
logger.setLevel(logging.INFO)
logger.addFilter(_is_rank_zero_or_error)
