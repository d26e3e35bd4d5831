"""The resumable state of a run, RUN/checkpoints/step_N/: finding it, verifying it, loading it.

A folder holds sharded tensors (torch.distributed.checkpoint), state.json with the scalars and the data position,
rng_R.json for every rank R, and the manifest of all of them. :mod:`finch.checkpoint.writer` writes it. What a user takes away, the
Hugging Face folders, is written by :mod:`finch.weights.huggingface`.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from finch import run_files
from finch.checkpoint import manifest, rng
from finch.checkpoint.manifest import CorruptCheckpoint
from finch.distributed.parallel import Parallel
from finch.dtensor import to_local
from finch.errors import UserError

STATE_FILE = "state.json"
FORMAT = 1  # of state.json; another number: it cannot be read any more
# Keys of a run's identity that are None where the rows were not read ahead (check_dataset=False).
UNKNOWN_WITHOUT_CHECK = ("number of target tokens", "digest of the tokenized rows")
REPLACED = ".replaced"  # a checkpoint whose place the next save of the same step is about to take
_NAME = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the one that has come furthest first; a folder without a manifest is not whole."""
    found = [
        (int(name[1]), name[2] is None, path)
        for path in (run / run_files.CHECKPOINTS).glob("step_*")
        if (name := _NAME.fullmatch(path.name)) and (path / manifest.FILE_NAME).is_file()
    ]
    return [path for _, _, path in sorted(found, reverse=True)]


def step_of(folder: Path) -> int:
    """The step whose state a checkpoint holds, by its name."""
    name = _NAME.fullmatch(folder.name)
    return int(name[1]) if name else 0


def candidates(run: Path, resume: bool | str) -> list[Path]:
    """What ``resume_from_checkpoint`` allows to go on from, in the order of preference; empty: start afresh.

    Raises:
        UserError: there is nothing to go on from, and the value does not allow to start afresh.
    """
    if resume is False:
        return []
    if resume is True or resume == "auto":
        found = checkpoints(run)
        if not found and resume is True:
            raise UserError(
                f"resume_from_checkpoint=True, but output_dir={run} holds no checkpoint; set it to False, or correct output_dir"
            )
        return found
    path = Path(resume)
    if not (path / manifest.FILE_NAME).is_file():
        raise UserError(
            f"resume_from_checkpoint={resume} is not a whole checkpoint; give True, auto, or a folder like {run / run_files.CHECKPOINTS}/step_100"
        )
    return [path]


def latest_valid(found: Sequence[Path], parallel: Parallel) -> tuple[Path | None, list[str]]:
    """The first of ``found`` that every rank finds as it was written, and a sentence about each one before it.

    The ranks share the reading and agree on the verdict. Nothing has been unpickled by then.

    Args:
        found: rank 0's counts, since a shared file system may show the ranks different folders.
    """
    damages: list[str] = []
    for folder in parallel.gather_all_ranks(list(found))[0]:
        told = None
        try:
            entries = manifest.read(folder)
            manifest.verify(folder, sorted(entries)[parallel.rank :: parallel.world_size], entries)
        except CorruptCheckpoint as error:
            told = str(error)
        told = next((each for each in parallel.gather_all_ranks(told) if each is not None), None)
        if told is None:
            return folder, damages
        damages.append(f"{folder} is damaged ({told}) and is not used")
    return None, damages


def read_state(folder: Path) -> dict[str, Any]:
    """The scalars of a checkpoint."""
    return json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))


def rng_file(rank: int) -> str:
    return f"rng_{rank}.json"


def restore_rng(folder: Path, state: dict[str, Any], parallel: Parallel) -> None:
    """Puts this rank's random states back. Where another number of ranks has saved there are none for this layout: it draws
    new ones from the run's seed and step."""
    if state["world_size"] == parallel.world_size:
        rng.restore(json.loads((folder / rng_file(parallel.rank)).read_text(encoding="utf-8")), parallel.device)
    else:
        rng.seed(f"{state['seed']} {state['step']} {parallel.rank}")


def load_tensors(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], parallel: Parallel) -> None:
    """Loads model and optimizer in place, on any number of ranks, from a folder that has been verified.

    Raises:
        UserError: it does not hold what this model and this optimizer need.
    """
    tensors = tensors_of(model, optimizers)
    # The learning rate and the other hyperparameters are the config's, as the optimizer was built with them.
    groups = get_optimizer_state_dict(model, optimizers)["param_groups"]
    try:
        silence_dcp()
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=parallel.world_size == 1)
    except CheckpointException as error:
        reason = " ".join(str(next(iter(error.failures.values()), (error,))[0]).split())[:200]
        raise UserError(
            f"resume_from_checkpoint: {folder} cannot be read ({reason}); it is damaged, remove it"
        ) from error
    set_optimizer_state_dict(model, optimizers, {"state": tensors["optimizer"], "param_groups": groups})


def check_identity(state: dict[str, Any], identity: dict[str, Any], folder: Path) -> None:
    """Refuses to go on with another run's checkpoint.

    Args:
        identity: what makes the run this run: the config keys that decide weights, data and order.

    Raises:
        UserError: names the first key that differs; or it is another version's checkpoint.
    """
    if state.get("format") != FORMAT:
        raise UserError(
            f"resume_from_checkpoint: {folder} was written by another version of finch (format {state.get('format')} of its state, this one reads "
            f"{FORMAT}); go on with that version, or start afresh in another output_dir"
        )
    for key, value in identity.items():
        kept = state["identity"].get(key)
        if kept != value and not (key in UNKNOWN_WITHOUT_CHECK and None in (kept, value)):
            raise UserError(
                f"resume_from_checkpoint: {folder} belongs to a run with {key}={json.dumps(kept)}, this config says "
                f"{json.dumps(value)}; give that run's config, or another output_dir"
            )


def remove(folder: Path) -> None:
    """Removes a checkpoint, its manifest first: one that is half removed must not look like one that was damaged."""
    (folder / manifest.FILE_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def archive_newer(run: Path, folder: Path) -> None:
    """Renames the checkpoints of ``run`` that came after ``folder``, from which the run goes on, so that a later ``auto``
    does not return to what has been left; they go with the next save."""
    found = checkpoints(run)
    if folder.resolve() in [path.resolve() for path in found]:
        for path in found:
            if path.resolve() == folder.resolve():
                break
            path.rename(path.with_name(path.name + ".left"))


def tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What torch.distributed.checkpoint keeps: tensors alone, so that loading unpickles no object of ours; trained ones alone,
    since the others are the pretrained model's."""
    trained = {
        name.replace(_CHECKPOINT_PREFIX, "") for name, weight in model.named_parameters() if weight.requires_grad
    }
    weights = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    state = get_optimizer_state_dict(model, optimizers)["state"]
    if any(optimizer.state for optimizer in fresh):
        # torch has made their states by a step with gradients of zero, which must not count as one.
        for each in (each for optimizer in fresh for each in optimizer.state.values() if "step" in each):
            each["step"] = torch.zeros_like(each["step"]) if isinstance(each["step"], torch.Tensor) else 0
        state = get_optimizer_state_dict(model, optimizers)["state"]
    return {"model": weights, "optimizer": state}


def are_finite(weights: Iterable[torch.Tensor]) -> bool:
    """Whether every number of this rank's shards is; reads their device once."""
    flags = [to_local(weight.detach()).isfinite().all() for weight in weights]
    return not flags or bool(torch.stack(flags).all())


def silence_dcp() -> None:
    """One process is meant. For good, since a filter that is put back would race with a save in another thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
