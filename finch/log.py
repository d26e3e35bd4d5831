"""What a run tells its user: torchtune's log, on rank 0."""

from __future__ import annotations

import logging

from torchtune import utils

log = utils.get_logger("INFO")


def say(message: str, level: int = logging.INFO) -> None:
    utils.log_rank_zero(log, message, level)


def warn(message: str) -> None:
    say(message, logging.WARNING)
