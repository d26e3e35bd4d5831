"""finch's logger, and what other packages log. Rank 0 speaks for all ranks; the others are silent below ERROR."""

from __future__ import annotations

import logging
import os
import re
import sys

logger = logging.getLogger("finch")
# All but tab and line feed; also Unicode's line separators, the signs that turn the direction of text, and surrogates,
# which UTF-8 cannot encode.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text of a model or of somebody else's files, whose control characters would act on a terminal or end a page, with these escaped."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
        return mark + printable(super().format(record))


# A program that imports finch may have set up the root logger, which would then write each line a second time.
if not logger.hasHandlers():
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
logger.setLevel(logging.INFO)
logger.addFilter(_is_rank_zero_or_error)
