"""The recipe, with three modes of saving in turn: never, in the background, and while training waits. Writes how long each stretch took.

torchrun --nproc_per_node 2 -m benchmarks.saving.recipe --config FILE

A stretch is ``checkpoint.every_n_steps`` steps. One with a save begins with it and ends after it. Neighbours in time are compared, so that
a machine that slows down or warms up favours no mode. The first stretch is warm-up.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import finch_full_finetune
from finch_full_finetune import FinchFullFinetune

from finch.checkpoint.writer import CheckpointWriter
from finch.config.parser import parse
from finch.config.schema import FullFinetuneKeys
from finch.errors import exit_without_teardown
from finch.training import checkpointer

FILE_NAME = "stretches.jsonl"
NEVER, ASYNC, SYNC = MODES = ("never", "async", "sync")


class AlternatingWriter(CheckpointWriter):
    """Appends {mode, seconds} of each stretch to RUN/stretches.jsonl."""

    def __init__(self, run: Path, *args: Any, every_n_steps: int | None, **kwargs: Any) -> None:
        super().__init__(run, *args, every_n_steps=every_n_steps, **kwargs)
        # Each round has every mode once; over six rounds each mode has each place, and follows each other mode, equally often.
        self._modes = itertools.chain.from_iterable(itertools.cycle(itertools.permutations(MODES)))
        self._mode: str | None = None
        self._start = 0.0
        self._file = run / FILE_NAME

    def is_due(self, step: int) -> bool:
        if not super().is_due(step):
            return False
        self.finish()
        now = time.perf_counter()
        if self._mode is not None and self._parallel.is_rank_zero:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mode": self._mode, "seconds": now - self._start}) + "\n")
        self._mode, self._start = next(self._modes), now
        self._asynchronous = self._mode == ASYNC
        return self._mode != NEVER


@parse(FullFinetuneKeys)
def recipe_main(cfg: Any) -> None:
    checkpointer.CheckpointWriter = AlternatingWriter  # type: ignore[misc, assignment]
    finch_full_finetune.run_recipe(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
