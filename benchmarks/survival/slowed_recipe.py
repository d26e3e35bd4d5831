"""The recipe with slow steps and slow saves, so that a kill at a random instant often hits a save.

torchrun --nproc_per_node 2 -m benchmarks.survival.slowed_recipe --config FILE

Only pauses are added: between the tensors of a shard, in the middle of each text file, around each rename and before each removal.
Rank 0 appends what it is doing to RUN.phases, next to the run's folder, so that the place of a kill is known afterwards: training, a
stage of a save, or the export.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import finch_full_finetune
import torch
from finch_full_finetune import FinchFullFinetune

from finch.base import files
from finch.base.errors import exit_without_teardown
from finch.checkpoint.writer import CheckpointWriter
from finch.config.parser import parse
from finch.config.schema import FullFinetuneKeys
from finch.training.loaded_model import LoadedModel
from finch.weights.files import SafetensorsWriter

START, END = "start", "end"  # phases: nothing has been written yet, and nothing is being done any more
STEP_S, PAUSE_S, TENSOR_S = 0.1, 0.04, 0.002
# The stages of a save by the functions in CheckpointWriter that run them
SAVE_PHASES = {
    "create_folder": "save: shards",
    "write_shard": "save: shards",
    "write_state": "save: states",
    "publish": "save: names",
}


class Phases:
    """Writes the current phase at every change: the one that began last, since a save runs during the training."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._active: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._change(self._active.append, name)
        try:
            yield
        finally:
            self._change(self._active.remove, name)

    def _change(self, change: Callable[[str], None], name: str) -> None:
        with self._lock:
            change(name)
            os.write(self._descriptor, ((self._active or [END])[-1] + "\n").encode())


def phases_file(run: Path) -> Path:
    return run.with_name(run.name + ".phases")


def slow_down(phases: Phases) -> None:
    """Adds the pauses, and records the phases."""

    def wrap(
        owner: Any, name: str, before: float = 0.0, after: float = 0.0, phase_of: Callable[..., str] | None = None
    ) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with phases.phase(phase_of(*args)) if phase_of is not None else contextlib.nullcontext():
                time.sleep(before)
                result = original(*args, **kwargs)
                time.sleep(after)
                return result

        setattr(owner, name, wrapped)

    def write_text(path: Path, text: str) -> None:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for half in (text[: len(text) // 2], text[len(text) // 2 :]):
                file.write(half)
                file.flush()
                time.sleep(PAUSE_S)
            os.fsync(file.fileno())

    files.write_text = write_text
    wrap(FinchFullFinetune, "train_step", STEP_S)
    wrap(torch, "save", TENSOR_S)  # torch.distributed.checkpoint writes a shard tensor by tensor
    wrap(Path, "rename", PAUSE_S, PAUSE_S)
    wrap(Path, "replace", PAUSE_S)
    wrap(shutil, "rmtree", PAUSE_S)
    wrap(SafetensorsWriter, "write_rows", TENSOR_S)
    wrap(FinchFullFinetune, "train", phase_of=lambda *_: "training")
    wrap(LoadedModel, "write", phase_of=lambda *_: "export")
    wrap(CheckpointWriter, "_run_on_all_ranks", phase_of=lambda _, action: SAVE_PHASES[action.__name__])


@parse(FullFinetuneKeys)
def recipe_main(cfg: Any) -> None:
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    slow_down(Phases(phases_file(Path(cfg.output_dir)) if is_rank_zero else Path(os.devnull)))
    finch_full_finetune.run_recipe(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
