"""The recipe with slow steps and slow saves, so that a kill at a random instant often hits a save.

torchrun --nproc_per_node 2 -m benchmarks.survival.slowed_recipe --config FILE

Only pauses are added: between the tensors of a shard, in the middle of each text file, around each rename and before each removal.
Rank 0 writes what it is doing to RUN.phases: training, a stage of a save, or the export.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finch_full_finetune
import torch
from finch_full_finetune import FinchFullFinetune

from benchmarks.survival.phases import Phases, phases_file
from finch import files
from finch.checkpoint.writer import CheckpointWriter
from finch.config.parser import parse
from finch.config.schema import FullFinetuneKeys
from finch.errors import exit_without_teardown
from finch.weights.files import SafetensorsWriter

STEP_S = 0.1
PAUSE_S = 0.04
TENSOR_S = 0.002

# The stages of a save by the functions in CheckpointWriter that run them
SAVE_PHASES = {
    "create_folder": "save: shards",
    "write_shard": "save: shards",
    "write_state": "save: states",
    "publish": "save: names",
}


def slow_down(phases: Phases | None) -> None:
    """Adds the pauses; ``phases`` is rank 0's."""

    def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: call(lambda: original(*args, **kwargs), *args))

    def slow(owner: Any, name: str, before: float, after: float = 0.0) -> None:
        def call(original: Callable[[], Any], *_: Any) -> Any:
            time.sleep(before)
            result = original()
            time.sleep(after)
            return result

        replace(owner, name, call)

    def record(owner: Any, name: str, phase_of: Callable[..., str]) -> None:
        def call(original: Callable[[], Any], *args: Any) -> Any:
            with contextlib.nullcontext() if phases is None else phases.phase(phase_of(*args)):
                return original()

        replace(owner, name, call)

    def write_text(path: Path, text: str) -> None:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for half in (text[: len(text) // 2], text[len(text) // 2 :]):
                file.write(half)
                file.flush()
                time.sleep(PAUSE_S)
            os.fsync(file.fileno())

    slow(FinchFullFinetune, "train_step", STEP_S)
    slow(torch, "save", TENSOR_S)  # torch.distributed.checkpoint writes a shard tensor by tensor
    slow(Path, "rename", PAUSE_S, PAUSE_S)
    slow(Path, "replace", PAUSE_S)
    slow(shutil, "rmtree", PAUSE_S)
    slow(SafetensorsWriter, "write_rows", TENSOR_S)
    files.write_text = write_text
    record(FinchFullFinetune, "train", lambda *_: "training")
    record(FinchFullFinetune, "write_weights", lambda *_: "export")
    record(CheckpointWriter, "_run_on_all_ranks", lambda _, action: SAVE_PHASES[action.__name__])


@parse(FullFinetuneKeys)
def recipe_main(cfg: Any) -> None:
    slow_down(Phases(phases_file(Path(cfg.output_dir))) if os.environ.get("RANK", "0") == "0" else None)
    finch_full_finetune.run_recipe(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
