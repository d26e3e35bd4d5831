"""The checkpoint a run resumes from, or is rolled back to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finch.checkpoint.reader import latest_valid, read_state
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger


class ResumePoint(NamedTuple):
    """A verified checkpoint and its scalars."""

    folder: Path
    scalars: dict[str, Any]


def resume_point(candidates: Sequence[Path], parallel: Parallel, resume: bool | str) -> ResumePoint | None:
    """Where the run continues, or None for a new run; a collective.

    Args:
        resume: ``resume_from_checkpoint``, for the error message.

    Raises:
        UserError: every candidate is damaged.
    """
    remedy = "start from scratch with overwrite=True"
    folder = choose_checkpoint(candidates, parallel, key=f"resume_from_checkpoint={resume}", remedy=remedy)
    if folder is None:
        return None
    scalars = read_state(folder)
    logger.info(f"resumed from step {scalars['step']} of {folder}")
    return ResumePoint(folder, scalars)


def choose_checkpoint(candidates: Sequence[Path], parallel: Parallel, *, key: str, remedy: str) -> Path | None:
    """The first candidate that is as it was written, or None where there is no candidate; a collective. Warns of damaged ones.

    Args:
        candidates: the preferred one first.
        key, remedy: of the error message.

    Raises:
        UserError: every candidate is damaged.
    """
    folder, damages = latest_valid(candidates, parallel)
    if damages and folder is None:
        raise UserError(f"{key}: {damages[0]}, and there is no other; {remedy}")
    for message in damages:
        logger.warning(message)
    return folder
