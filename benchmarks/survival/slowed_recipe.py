"""The recipe with slow saves and slow steps, so that a kill at a random instant often lands within one; says where it is.

torchrun --nproc_per_node 2 -m benchmarks.survival.slowed_recipe --config FILE

Nothing but pauses is added: between the tensors of a shard, in the middle of each text file, around each rename and before each
removal. Rank 0 appends what it is doing to RUN.phases, a line a change: training, or a part of a save or of the export.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finch_full_finetune
import torch
from finch_full_finetune import FinchFullFinetune

from benchmarks.survival.phases import Phases, phases_file
from finch import files
from finch.checkpoint import writer as saver
from finch.config.parser import parse
from finch.config.schema import FULL_FINETUNE
from finch.errors import exit_without_teardown
from finch.weights import huggingface

STEP_S = 0.1
PAUSE_S = 0.04
TENSOR_S = 0.002

# The four stretches of a save, which every rank runs through together
PARTS = {
    "create_folder": "save: shards",
    "write_shard": "save: shards",
    "write_state": "save: states",
    "publish": "save: names",
}
EXPORT = "export"


def slow_down(phases: Phases | None) -> None:
    """Puts the pauses in; ``phases`` is rank 0's."""

    def phase(name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if phases is None else phases.of(name)

    def slowed(owner: Any, name: str, before: float, after: float = 0.0) -> None:
        original = getattr(owner, name)

        def paused(*args: Any, **kwargs: Any) -> Any:
            time.sleep(before)
            result = original(*args, **kwargs)
            time.sleep(after)
            return result

        setattr(owner, name, paused)

    def named(owner: Any, name: str, phase_of: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            with phase(phase_of(*args)):
                return original(*args, **kwargs)

        setattr(owner, name, noted)

    def write_text(path: Path, text: str) -> None:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            time.sleep(PAUSE_S)
            file.write(text[len(text) // 2 :])
            file.flush()
            os.fsync(file.fileno())

    slowed(FinchFullFinetune, "_train_step", STEP_S)
    slowed(torch, "save", TENSOR_S)  # torch.distributed.checkpoint writes a shard tensor by tensor
    slowed(Path, "rename", PAUSE_S, PAUSE_S)
    slowed(Path, "replace", PAUSE_S)
    slowed(shutil, "rmtree", PAUSE_S)
    slowed(huggingface, "save_file", PAUSE_S, PAUSE_S)
    files.write_text = write_text
    named(FinchFullFinetune, "train", lambda *_: "training")
    named(FinchFullFinetune, "_export", lambda *_: EXPORT)
    named(saver.CheckpointWriter, "_run_on_all_ranks", lambda _, action: PARTS[action.__name__])


@parse(FULL_FINETUNE)
def recipe_main(cfg: Any) -> None:
    slow_down(Phases(phases_file(Path(cfg.output_dir))) if os.environ.get("RANK", "0") == "0" else None)
    finch_full_finetune.run(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    sys.stdout.flush()
    exit_without_teardown()
