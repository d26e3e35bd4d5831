"""The questions that a run trains on, from its config: which rows of a test the model has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finch.errors import UserError
from finch.log import logger
from finch.run_files import CONFIG


def training_questions(run: Path) -> frozenset[str] | None:
    """The user's first turn of each row of the run's ``dataset``; None where the run has no config or its rows are not there any more."""
    from omegaconf import OmegaConf

    from finch.data.dataset import load_unpacked

    if not (run / CONFIG).is_file():
        return None
    tokenizer = _FirstTurn()
    try:
        rows = load_unpacked(OmegaConf.load(run / CONFIG), "dataset", tokenizer).data
        for index in range(len(rows)):
            rows[index]
    except (UserError, OSError, KeyError) as error:
        logger.warning(f"{run / CONFIG}: the rows that it trained on are unknown ({error})")
        return None
    return frozenset(tokenizer.questions)


class _FirstTurn:
    """Takes the place of a tokenizer, and collects what it would tokenize."""

    max_seq_len = None

    def __init__(self) -> None:
        self.questions: set[str] = set()

    def __call__(self, sample: Any, inference: bool = False) -> dict[str, Any]:
        self.questions.update([message.text_content for message in sample["messages"] if message.role == "user"][:1])
        return {"tokens": [0], "mask": [False]}
