"""A run's checkpoints as TorchTitan writes them: which one is loaded, and what is in it, read without its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from finch.weights.files import SAFETENSORS_INDEX

SCHEDULER_STATE = "lr_scheduler."
FINCH_STATE = f"{SCHEDULER_STATE}ema_loss"
_METADATA = ".metadata"


def folder_of(config: Any) -> Path:
    """Where a run's checkpoints are."""
    return Path(config.dump_folder) / config.checkpoint.folder


def is_finished(config: Any) -> bool:
    """Whether the run has saved its last step as a model only: there is nothing to resume."""
    run = folder_of(config)
    last = run / f"step-{config.training.steps}"
    # A Hugging Face folder gets its config.json last.
    is_whole = any((last / name).is_file() for name in (_METADATA, "config.json"))
    is_last = is_whole and folder_to_load(config) == last
    return is_last and not any(name.startswith(SCHEDULER_STATE) for name in names_in(last))


def way_to_resume(config: Any) -> str:
    """How a run continues whose last step was saved as a model only."""
    run = folder_of(config)
    steps = sorted(complete_steps(run), reverse=True)
    step = next((step for step in steps if FINCH_STATE in names_in(run / f"step-{step}")), None)
    if step is None:
        return "no other can be resumed, which --checkpoint.no-last_save_model_only changes"
    return f"resume with --checkpoint.load_step {step}"


def names_in(folder: Path) -> dict[str, Any]:
    """Of a checkpoint's entries; none for a Hugging Face folder."""
    is_native = (folder / _METADATA).is_file()
    return FileSystemReader(str(folder)).read_metadata().state_dict_metadata if is_native else {}


def complete_steps(run: Path) -> list[int]:
    """Those of complete checkpoints, which have the one file or the other."""
    return [
        int(folder.name.removeprefix("step-"))
        for folder in run.glob("step-*")
        if folder.name.removeprefix("step-").isdigit()
        and any((folder / name).is_file() for name in (_METADATA, SAFETENSORS_INDEX))
    ]


def folder_to_load(config: Any) -> Path | None:
    """The checkpoint that the trainer will resume from, chosen as TorchTitan does; None: there is none, or only the model is loaded."""
    run, checkpoint = folder_of(config), config.checkpoint
    if not checkpoint.enable:
        return None
    step = checkpoint.load_step if checkpoint.load_step != -1 else max(complete_steps(run), default=-1)
    if step > 0:
        return run / f"step-{step}"
    if step == -1 and checkpoint.initial_load_path and not checkpoint.initial_load_model_only:
        return Path(checkpoint.initial_load_path)
    return None
