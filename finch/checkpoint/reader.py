"""Finding, verifying and loading the state a run resumes from, RUN/checkpoints/step_N/. :mod:`finch.checkpoint.writer` writes it.

A checkpoint holds what a resumed run needs to continue bit for bit, and nothing that can be rebuilt:

__R_N.distcp, .metadata  trained weights and optimizer state, sharded (torch.distributed.checkpoint). Not the frozen weights, which
                         are the pretrained model's, and not learning rates and other hyperparameters, which are the config's.
state.json               position (step, epoch, samples consumed in it), seed, learning-rate schedule, best epoch, number of
                         lines in metrics.jsonl, the hooks, and the identity of the run. Not the order of the samples, which follows from
                         seed and epoch, and no state of the data loader: the position is all it needs, on any number of ranks.
                         With ``has_weights: false`` that of a run that has ended, which is all that is there.
rng_R.json               random states of rank R, for dropout and stochastic rounding.
manifest.json            size and SHA-256 of these files; written last, so a folder without it is incomplete.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from finch.base import files, run_files
from finch.base.dtensor import to_local
from finch.base.errors import UserError
from finch.checkpoint import manifest
from finch.checkpoint.manifest import CorruptCheckpoint
from finch.distributed.parallel import Parallel

STATE_FILE = "state.json"
FORMAT = 1
"""Version of state.json; another one cannot be read."""
UNKNOWN_WITHOUT_CHECK = (
    *("number of target tokens", "digest of the tokenized rows"),
    *("tokenizer.date", "digest of the replayed prompts", "digest of the validation rows", "digest of the weights"),
)
"""Keys of a run's identity that are None where the rows were not read ahead (check_dataset=False), or an earlier version kept none."""
REPLACED = ".replaced"
"""Suffix of a checkpoint while the next save of the same step takes its place."""
ARCHIVED = ".left"
"""Suffix of a checkpoint later than the one its run has resumed from; never resumed from, removed by the next save."""
_NAME = re.compile(rf"step_(\d+)({'|'.join(map(re.escape, (REPLACED, ARCHIVED, files.PARTIAL)))})?")


def own_folders(run: Path) -> list[Path]:
    """What the saves of a run have left in RUN/checkpoints: folders by their names. Not links, which show another run's, nor what a user has put
    there: neither is ever removed."""
    folder = run / run_files.CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the latest step first."""
    checkpoints = [
        (int(name[1]), name[2] is None, path)
        for path in own_folders(run)
        if (name := _NAME.fullmatch(path.name))
        # A save that was killed between its two renames leaves only the replaced folder, which is complete.
        and name[2] in (None, REPLACED)
        and (path / manifest.FILE_NAME).is_file()
    ]
    # Of one step the new folder comes before the one that it replaces.
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def remove_surplus(run: Path, used: Path, keep_last: int) -> None:
    """Removes what a save that was killed before it did so has left: checkpoints before the ``keep_last`` up to ``used``, whole or in part."""
    checkpoints = [path.resolve() for path in list_checkpoints(run)]
    if used.resolve() not in checkpoints:
        return
    place = checkpoints.index(used.resolve())
    for path in own_folders(run):
        # Later steps stay: this run may still be refused, and archives them when it begins.
        is_plain = path.name.removeprefix("step_").isdecimal()
        if is_plain and path.resolve() not in checkpoints[: place + keep_last] and _step(path) < _step(used):
            remove_checkpoint(path)


def _step(checkpoint: Path) -> int:
    name = _NAME.fullmatch(checkpoint.name)
    assert name is not None
    return int(name[1])


def find_resume_candidates(run: Path, resume: bool | str) -> list[Path]:
    """The checkpoints that ``resume_from_checkpoint`` allows to resume from, the preferred one first; empty: start from scratch. Raises
    UserError if there is none, and the value does not allow a start from scratch."""
    if resume is False:
        return []
    if resume is True or resume == "auto":
        candidates = list_checkpoints(run)
        if not candidates and resume is True:
            raise UserError(
                f"resume_from_checkpoint=True, but output_dir={run} holds no checkpoint; set it to False, or correct output_dir"
            )
        return candidates
    path = Path(resume)
    if not (path / manifest.FILE_NAME).is_file():
        raise UserError(
            f"resume_from_checkpoint={resume} is not a complete checkpoint; give True, auto, or a folder like {run / run_files.CHECKPOINTS}/step_100"
        )
    return [path]


def latest_valid(candidates: Sequence[Path], parallel: Parallel) -> tuple[Path | None, list[str]]:
    """The first of ``candidates`` whose files match its manifest, and a warning about each one before it; a collective.

    The ranks share the reading and agree on the result. Nothing is unpickled. Rank 0's candidates are used, since a shared file system
    may show the ranks different folders.
    """
    damages: list[str] = []
    for folder in parallel.gather_all_ranks(list(candidates))[0]:
        message = None
        try:
            entries = manifest.read(folder)
            manifest.verify(folder, sorted(entries)[parallel.rank :: parallel.world_size], entries)
        except CorruptCheckpoint as error:
            message = str(error)
        # All ranks take the same message, so that all try the same folder next.
        message = next((each for each in parallel.gather_all_ranks(message) if each is not None), None)
        if message is None:
            return folder, damages
        damages.append(f"{folder} is damaged ({message}) and is not used")
    return None, damages


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads(files.read_bytes(folder / STATE_FILE))


def rng_file_name(rank: int) -> str:
    return f"rng_{rank}.json"


def load_rng_state(folder: Path, state: dict[str, Any], parallel: Parallel) -> None:
    """Restores this rank's random states. A checkpoint of another number of ranks has none for this layout: new ones are
    seeded from the run's seed and step."""
    if state["world_size"] == parallel.world_size:
        _set_random_state(
            json.loads((folder / rng_file_name(parallel.rank)).read_text(encoding="utf-8")), parallel.device
        )
    else:
        _seed_all(f"{state['seed']} {state['step']} {parallel.rank}")


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random number generators of this process as plain JSON: Python, NumPy, torch on the CPU and on ``device``, this
    rank's GPU."""
    # Plain numbers: a pickle would run whatever somebody has written into it.
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores what ``random_state`` returned. A GPU's generator is unchanged where its state was not saved."""
    version, numbers, gauss = state["python"]
    # JSON has made lists of the tuples, which Python's generator insists on.
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_to_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_to_tensor(state["cuda"]), device)


def _seed_all(text: str) -> None:
    """Seeds all generators, torch's on every device, from a text."""
    # NumPy takes no seed of more than 32 bits.
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_tensor(text: str) -> torch.Tensor:
    # A copy, since torch warns of a buffer that cannot be written.
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def load_tensors(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    parallel: Parallel,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Loads model and optimizer state, and ``extra`` tensors, in place, on any number of ranks, from a verified folder. Raises UserError if
    a tensor of this model or optimizer is missing or has another shape."""
    tensors = tensor_state_dict(model, optimizers, extra)
    # Learning rate and other hyperparameters stay the config's, as the optimizer was built with them.
    groups = get_optimizer_state_dict(model, optimizers)["param_groups"]
    try:
        ignore_one_process_warning()
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=parallel.world_size == 1)
    except CheckpointException as error:
        reason = " ".join(str(next(iter(error.failures.values()), (error,))[0]).split())[:200]
        raise UserError(
            f"resume_from_checkpoint: {folder} cannot be loaded into this config's model and optimizer ({reason}); give that run's config, the optimizer's "
            "options included, or another output_dir"
        ) from error
    set_optimizer_state_dict(model, optimizers, {"state": tensors["optimizer"], "param_groups": groups})


def check_identity(state: dict[str, Any], identity: dict[str, Any], folder: Path) -> None:
    """Refuses to resume from another run's checkpoint; ``identity`` is this run's, see :func:`finch.training.run.identity_of`.

    Raises UserError that names the first key that differs, or if the checkpoint has another format.
    """
    if state.get("format") != FORMAT:
        raise UserError(
            f"resume_from_checkpoint: {folder} was written by another version of finch (format {state.get('format')} of its state, this one reads "
            f"{FORMAT}); continue with that version, or start from scratch in another output_dir"
        )
    for key, value in identity.items():
        saved = state["identity"].get(key)
        # The folder of finch.models.auto may be elsewhere where the run is resumed; its name is checkpointer.checkpoint_dir's.
        is_moved = key == "model" and isinstance(saved, dict) and {**saved, "path": None} == {**value, "path": None}
        if saved != value and not is_moved and not (key in UNKNOWN_WITHOUT_CHECK and None in (saved, value)):
            raise UserError(
                f"resume_from_checkpoint: {folder} belongs to a run with {key}={json.dumps(saved)}, this config says "
                f"{json.dumps(value)}; give that run's config, or another output_dir"
            )


def remove_checkpoint(folder: Path) -> None:
    """Removes the manifest first: a checkpoint that is half removed must not look damaged."""
    (folder / manifest.FILE_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def archive_newer(run: Path, folder: Path) -> bool:
    """Renames the checkpoints of ``run`` later than ``folder``, which the run resumes from, so that the next ``auto`` does not resume
    from them. Returns whether there are some."""
    checkpoints = list_checkpoints(run)
    # The user may have named the folder by a relative path or a link. One of another run has no later ones here.
    resolved = [path.resolve() for path in checkpoints]
    newer = checkpoints[: resolved.index(folder.resolve())] if folder.resolve() in resolved else []
    for path in newer:
        archive(path)
    return bool(newer)


def archive(folder: Path) -> None:
    """Renames a folder, so that it is no longer taken for the run's."""
    archived = folder.with_name(folder.name + ARCHIVED)
    shutil.rmtree(archived, ignore_errors=True)  # of an earlier resume
    folder.rename(archived)


def tensor_state_dict(
    model: nn.Module, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves: trained weights and optimizer state, tensors only, so that loading unpickles no
    object of ours."""
    # Activation checkpointing hides its prefix in the names of a state dict, but not in those of a parent's parameters.
    trained = {
        name.replace(_CHECKPOINT_PREFIX, "") for name, weight in model.named_parameters() if weight.requires_grad
    }
    weights = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    uninitialized = [optimizer for optimizer in optimizers if not optimizer.state]
    state = get_optimizer_state_dict(model, optimizers)["state"]
    if any(optimizer.state for optimizer in uninitialized):
        # torch has created their states by a step with zero gradients, which must not count as a step.
        for each in (each for optimizer in uninitialized for each in optimizer.state.values() if "step" in each):
            each["step"] = torch.zeros_like(each["step"]) if isinstance(each["step"], torch.Tensor) else 0
        state = get_optimizer_state_dict(model, optimizers)["state"]
    return {"model": weights, "optimizer": state, **({"hooks": dict(extra)} if extra else {})}


def all_finite(weights: Iterable[torch.Tensor]) -> bool:
    """Whether every element of this rank's shards is finite; one synchronization with the device."""
    flags = [to_local(weight.detach()).isfinite().all() for weight in weights]
    return not flags or bool(torch.stack(flags).all())


def ignore_one_process_warning() -> None:
    """Silences torch's warning of a process without a group, as intended here. Not undone: that would race with a save in another thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
