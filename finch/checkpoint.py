"""The resumable state of a run: RUN/checkpoints/step_N/ with sharded tensors (torch.distributed.checkpoint) and
state.json.

What a user takes away, the Hugging Face folders, is written by :mod:`finch.huggingface`.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from finch.errors import UserError
from finch.parallel import Parallel

FOLDER = "checkpoints"
STATE_FILE = "state.json"
# Keys of a run's identity that are None where the rows were not read ahead (check_dataset=False).
UNKNOWN_WITHOUT_CHECK = ("number of target tokens", "digest of the tokenized rows")
_STEP = re.compile(r"^step_(\d+)$")


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of a run that has come furthest; folders without a state.json are not whole and do not count."""
    found = [path for path in (run / FOLDER).glob("step_*") if _STEP.match(path.name) and (path / STATE_FILE).is_file()]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def save_checkpoint(
    run: Path, step: int, model: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any], parallel: Parallel
) -> Path:
    """Saves everything a run needs to go on: written beside, then renamed; the one before goes when this one is
    whole.

    Args:
        model: the decoder, sharded or not.
        optimizers: one, or with the optimizer inside the backward one for each parameter.
        state: scalars as plain JSON: position, schedule, identity of the run.
    """
    target = run / FOLDER / f"step_{step}"
    partial = target.with_name(target.name + ".partial")
    if parallel.is_rank_zero:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    parallel.barrier()
    _dcp(dcp.save, _tensors(model, optimizers), partial, parallel)
    parallel.barrier()
    if parallel.is_rank_zero:
        (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for other in target.parent.iterdir():
            if other != target:
                shutil.rmtree(other, ignore_errors=True)
    parallel.barrier()
    return target


def read_state(folder: Path) -> dict[str, Any]:
    """The scalars of a checkpoint."""
    return json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))


def load_tensors(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], parallel: Parallel) -> None:
    """Loads model and optimizer in place, on any number of ranks."""
    tensors = _tensors(model, optimizers)
    # The learning rate and the other hyperparameters are the config's, as the optimizer was built with them.
    groups = get_optimizer_state_dict(model, optimizers)["param_groups"]
    try:
        _dcp(dcp.load, tensors, folder, parallel)
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
        UserError: names the first key that differs.
    """
    for key, value in identity.items():
        kept = state["identity"].get(key)
        if kept != value and not (key in UNKNOWN_WITHOUT_CHECK and None in (kept, value)):
            raise UserError(
                f"resume_from_checkpoint: {folder} belongs to a run with {key}={json.dumps(kept)}, this config says "
                f"{json.dumps(value)}; give that run's config, or another output_dir"
            )


def _tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What torch.distributed.checkpoint keeps: tensors alone, so that loading unpickles no object of ours; trained ones alone,
    since the others are the pretrained model's."""
    trained = {
        name.replace(_CHECKPOINT_PREFIX, "") for name, weight in model.named_parameters() if weight.requires_grad
    }
    weights = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizers)["state"]}


def _dcp(action: Any, tensors: dict[str, Any], folder: Path, parallel: Parallel) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        action(tensors, checkpoint_id=str(folder), no_dist=parallel.mesh is None)
