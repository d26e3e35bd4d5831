"""Writing checkpoints that are complete or absent: into a folder next to their place, synced, then renamed.

With ``asynchronous`` a thread with a separate process group writes while training continues. torch's ``dcp.async_save`` is not used: its
future ends with the tensors, before manifest and rename, and its thread is no daemon, so that a rank that has lost another one would wait
for the save's timeout before it ends.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from finch.base import files, run_files
from finch.base.errors import WriteFailed
from finch.base.log import logger
from finch.checkpoint import manifest
from finch.checkpoint.reader import (
    REPLACED,
    STATE_FILE,
    ignore_one_process_warning,
    list_checkpoints,
    own_folders,
    random_state,
    remove_checkpoint,
    rng_file_name,
    tensor_state_dict,
)
from finch.distributed.parallel import Parallel

_SHARD_NAME = re.compile(r"__(\d+)_\d+\.distcp")


class CheckpointWriter:
    """Saves the state of a run when it is due. What a checkpoint holds and why: :mod:`finch.checkpoint.reader`.

    Args:
        every_n_steps, every_n_minutes: when a save is due; None: not for this reason.
        keep_last: number of complete checkpoints to keep.
        asynchronous: whether ``save`` may return before everything is on the disk.
        timeout_s: seconds after which a rank that does not answer fails the save.
    """

    def __init__(
        self,
        run: Path,
        parallel: Parallel,
        *,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        keep_last: int = 1,
        asynchronous: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self._folder, self._run, self._parallel, self._keep_last = run / run_files.CHECKPOINTS, run, parallel, keep_last
        self._every_n_steps, self._every_n_minutes, self._asynchronous = every_n_steps, every_n_minutes, asynchronous
        # Collectives of a save in the background must not mix with those of the training step.
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if parallel.world_size > 1 else None
        )
        self._last_save_time = time.monotonic()
        self._thread: threading.Thread | None = None
        self._outcome: tuple[str, BaseException | None] | None = None  # of the last save: log message, error
        ignore_one_process_warning()

    def is_due(self, step: int) -> bool:
        """Whether every rank should save after ``step``."""
        return self._every_n_steps is not None and step % self._every_n_steps == 0

    def is_time(self) -> bool:
        """Whether this rank should save, whose clock is not that of others: if one should, all must."""
        minutes = self._every_n_minutes
        return minutes is not None and time.monotonic() - self._last_save_time >= 60 * minutes

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        state: dict[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
        has_tensors: bool = True,
    ) -> bool:
        """Saves everything a run needs to resume after ``step``; a collective. Waits for an earlier save first.

        Args:
            model: the decoder, sharded or not.
            optimizers: one, or with the optimizer inside the backward one per parameter.
            state: plain JSON: position, schedule, identity of the run. Rank 0's is saved.
            extra: nested dictionaries of further tensors.
            wait: until everything is on the disk, even with ``asynchronous``.
            has_tensors: False leaves out the tensors; nothing can resume from that.

        Returns:
            False if the disk refused a file. With ``asynchronous`` and without ``wait`` the save has only begun: True.
        """
        self.finish()
        self._last_save_time = time.monotonic()
        tensors = tensor_state_dict(model, optimizers, extra) if has_tensors else {}
        state_text = json.dumps({**state, "world_size": self._parallel.world_size}, indent=2) + "\n"
        rng_text = json.dumps(random_state(self._parallel.device)) + "\n"
        if wait or not self._asynchronous:
            self._write(step, tensors, state_text, rng_text)
            return self.finish()
        tensors = tree_map(_copy_to_host, tensors)  # the next step changes them in place
        # The copies may still be under way, and the thread does not wait for the device.
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize()
        self._thread = threading.Thread(
            target=self._write, args=(step, tensors, state_text, rng_text), name="finch-save", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> None:
        """Logs the outcome of a save in the background that has ended; no collective."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> bool:
        """Waits for a save in the background and logs its outcome. Returns False if the disk refused a file; raises what is a defect."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._outcome is None:
            return True
        (message, error), self._outcome = self._outcome, None
        if error is not None and not isinstance(error, WriteFailed):
            raise error
        logger.log(logging.INFO if error is None else logging.WARNING, message)
        return error is None

    def close(self) -> None:
        """Waits for a save in the background; not among several ranks, where it may wait for one that is lost."""
        if self._parallel.world_size == 1:
            self.finish()

    # In the saving thread

    def _write(self, step: int, tensors: dict[str, Any], state_text: str, rng_text: str) -> None:
        if (device := self._parallel.device).type == "cuda":
            torch.cuda.set_device(device)  # a new thread's is 0: DCP would make a context there on every rank
        try:
            self._outcome = (self._write_checkpoint(step, tensors, state_text, rng_text), None)
        except WriteFailed as error:
            if self._parallel.is_rank_zero:  # what has been written takes up the missing space
                shutil.rmtree(self._folder / f"step_{step}{files.PARTIAL}", ignore_errors=True)
            last = next(iter(list_checkpoints(self._run)), None)
            fallback = "there is no earlier checkpoint" if last is None else f"{last} stays"
            self._outcome = (
                f"the state of step {step} could not be saved ({error}); {fallback}, and the next save tries again",
                error,
            )
        # Python would only print an error of the thread: ``finish`` raises it in the training loop.
        except BaseException as error:
            self._outcome = ("", error)

    def _write_checkpoint(self, step: int, tensors: dict[str, Any], state_text: str, rng_text: str) -> str:
        start = time.perf_counter()
        parallel = self._parallel
        target = self._folder / f"step_{step}"
        partial = target.with_name(target.name + files.PARTIAL)

        def create_folder() -> None:
            if parallel.is_rank_zero:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)

        def write_shard() -> None:
            dcp.save(tensors, checkpoint_id=str(partial), process_group=self._group, no_dist=parallel.world_size == 1)

        def write_state() -> dict[str, Any]:
            """This rank's random states and, on rank 0, state.json; returns the manifest's entries of this rank's files."""
            # Every rank hashes the files that it has written, so that the reading is divided.
            names = [rng_file_name(parallel.rank)]
            files.write_text(partial / names[0], rng_text)
            names += [
                file.name
                for file in partial.iterdir()
                if (shard := _SHARD_NAME.fullmatch(file.name)) and int(shard[1]) == parallel.rank
            ]
            if parallel.is_rank_zero:
                files.write_text(partial / STATE_FILE, state_text)
                names += [STATE_FILE, ".metadata"]
            return {name: manifest.file_entry(partial / name) for name in names}

        # Each part begins when all ranks have ended the one before: no shard goes into a folder that is yet to be
        # emptied, and none is missing when the manifest is written.
        self._run_on_all_ranks(create_folder)
        self._run_on_all_ranks(write_shard)
        entries = self._run_on_all_ranks(write_state)

        def publish() -> None:
            if parallel.is_rank_zero:
                manifest.write(partial, {name: entry for each in entries for name, entry in each.items()})
                self._rename(partial, target)
                self._remove_old(target)

        self._run_on_all_ranks(publish)
        return f"saved the state of step {step} in {time.perf_counter() - start:.1f} s"

    def _rename(self, partial: Path, target: Path) -> None:
        # A folder cannot replace another in one step. Between the two renames the old one is found under its other name.
        if target.exists():
            replaced = target.with_name(target.name + REPLACED)
            remove_checkpoint(replaced)
            target.rename(replaced)
        partial.rename(target)
        files.sync(self._folder)
        files.sync(self._run)

    def _remove_old(self, target: Path) -> None:
        checkpoints = [path for path in list_checkpoints(self._run) if not path.name.endswith(REPLACED)]
        kept = checkpoints[checkpoints.index(target) :][: self._keep_last]
        for path in own_folders(self._run):
            if path not in kept:
                remove_checkpoint(path)

    def _run_on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Runs ``action`` on every rank and returns every rank's result; a failure on one rank fails all, with WriteFailed if the disk refused."""
        result, reason = None, None
        failure: BaseException | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            reason = _disk_error(error)
            if reason is None:
                failure, reason = error, f"{type(error).__name__}: {error}"
        # A rank that fails takes part before it raises, since the others wait for it here.
        outcomes = [(result, reason, failure is None)]
        if self._group is not None:
            outcomes *= self._parallel.world_size
            dist.all_gather_object(outcomes, outcomes[0], group=self._group)
        if failure is not None:
            raise failure
        # A defect counts before a full disk: after the latter training goes on, and it would be hidden.
        for rank, (_, reason, is_disk_error) in enumerate(outcomes):
            if reason is not None and not is_disk_error:
                raise RuntimeError(f"rank {rank} failed while saving a checkpoint: {reason}")
        for _, reason, _ in outcomes:
            if reason is not None:
                raise WriteFailed(reason)
        return [each for each, _, _ in outcomes]


def _copy_to_host(value: Any) -> Any:
    """A copy of a value on the host; of a GPU's in page-locked memory, which torch keeps for the next save, and without waiting for it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True, non_blocking=True)


def _disk_error(error: BaseException | None) -> str | None:
    """The system's message if a file could not be written, else None. torch's writers wrap that error, or drop its message."""
    if isinstance(error, CheckpointException):
        # A disk is full only if every rank that failed did so on it; one other error is a defect.
        reasons = [_disk_error(inner[0]) for inner in error.failures.values()]
        return None if any(reason is None for reason in reasons) else next(iter(reasons), None)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen.strerror or str(seen)
        seen = seen.__cause__ or seen.__context__
    return "a file could not be written to its end" if files.is_disk_error(error) else None
