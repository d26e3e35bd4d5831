"""Writes checkpoints: beside, synced, then renamed; while training goes on, in a thread with a process group of its own."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
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

from finch import files, run_files
from finch.checkpoint.reader import (
    REPLACED,
    STATE_FILE,
    checkpoints,
    manifest,
    remove,
    rng,
    rng_file,
    silence_dcp,
    tensors_of,
)
from finch.distributed.parallel import Parallel
from finch.errors import WriteFailed
from finch.log import logger

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


class CheckpointWriter:
    """Saves the state of a run when it is due.

    Args:
        run: the run's folder; the checkpoints are in its subfolder.
        parallel: the ranks that save together.
        every_n_steps, every_n_minutes: when a save is due; None: never for this reason.
        keep_last: whole checkpoints that stay.
        asynchronous: whether ``save`` may return before the disk has everything.
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
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None
        self._outcome: tuple[str, BaseException | None] | None = None
        silence_dcp()

    def is_due(self, step: int) -> bool:
        """Whether to save after ``step``. Clocks differ: what one rank finds due, all must save."""
        if self._every_n_steps is not None and step % self._every_n_steps == 0:
            return True
        return self._every_n_minutes is not None and time.monotonic() - self._began >= 60 * self._every_n_minutes

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        state: dict[str, Any],
        *,
        wait: bool = False,
    ) -> bool:
        """Saves everything a run needs to go on; every rank must call it at the same step.

        A save that still runs is waited for first.

        Args:
            model: the decoder, sharded or not.
            optimizers: one, or with the optimizer inside the backward one for each parameter.
            state: scalars as plain JSON: position, schedule, identity of the run. Rank 0's are kept.
            wait: until the disk has everything, whatever ``asynchronous`` says.

        Returns:
            Whether nothing has gone wrong so far: with ``wait``, or without ``asynchronous``, the checkpoint is whole.
        """
        self.finish()
        self._began = time.monotonic()
        tensors = tensors_of(model, optimizers)
        text = json.dumps({**state, "world_size": self._parallel.world_size}, indent=2) + "\n"
        random_states = json.dumps(rng.state(self._parallel.device)) + "\n"
        if wait or not self._asynchronous:
            self._write(step, tensors, text, random_states)
            return self.finish()
        tensors = tree_map(_copied, tensors)  # the next step changes them in place
        self._thread = threading.Thread(
            target=self._write, args=(step, tensors, text, random_states), name="finch-save", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> None:
        """Tells of a save in the background that has ended since; no collective."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> bool:
        """Waits for a save that still runs, and tells how it went. Returns whether it went well.

        Raises:
            Exception: of a save that failed for another reason than the disk, which is a defect.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._outcome is None:
            return True
        (sentence, error), self._outcome = self._outcome, None
        if error is not None and not isinstance(error, WriteFailed):
            raise error
        logger.log(logging.INFO if error is None else logging.WARNING, sentence)
        return error is None

    def close(self) -> None:
        """Lets a save that still runs come to its end; among several ranks that may wait for one that is lost, so not there."""
        if self._parallel.world_size == 1:
            self.finish()

    # Private: in the saving thread

    def _write(self, step: int, tensors: dict[str, Any], text: str, random_states: str) -> None:
        try:
            self._outcome = (self._write_checkpoint(step, tensors, text, random_states), None)
        except WriteFailed as error:
            if self._parallel.is_rank_zero:  # what has been written takes the room that is missing
                shutil.rmtree(self._folder / f"step_{step}{files.PARTIAL}", ignore_errors=True)
            last = next(iter(checkpoints(self._run)), None)
            stays = "there is none before it" if last is None else f"{last} stays"
            self._outcome = (
                f"the state of step {step} could not be saved ({error}); {stays}, and the next save tries again",
                error,
            )
        except BaseException as error:
            self._outcome = ("", error)

    def _write_checkpoint(self, step: int, tensors: dict[str, Any], text: str, random_states: str) -> str:
        began = time.perf_counter()
        parallel = self._parallel
        target = self._folder / f"step_{step}"
        partial = target.with_name(target.name + files.PARTIAL)

        def prepare() -> None:
            if parallel.is_rank_zero:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)

        def write_shard() -> None:
            dcp.save(tensors, checkpoint_id=str(partial), process_group=self._group, no_dist=parallel.world_size == 1)

        def write_rest() -> dict[str, Any]:
            """This rank's random states and, on rank 0, the scalars; the entries of all that this rank has written."""
            files.write_text(partial / rng_file(parallel.rank), random_states)
            mine = [rng_file(parallel.rank)]
            mine += [
                file.name
                for file in partial.iterdir()
                if (shard := _SHARD.fullmatch(file.name)) and int(shard[1]) == parallel.rank
            ]
            if parallel.is_rank_zero:
                files.write_text(partial / STATE_FILE, text)
                mine += [STATE_FILE, ".metadata"]
            return {name: manifest.digest_of(partial / name) for name in mine}

        self._run_on_all_ranks(prepare)
        self._run_on_all_ranks(write_shard)
        entries = self._run_on_all_ranks(write_rest)

        def rename() -> None:
            if parallel.is_rank_zero:
                manifest.write(partial, {name: entry for each in entries for name, entry in each.items()})
                self._put_in_place(partial, target)

        self._run_on_all_ranks(rename)
        return f"saved the state of step {step} in {time.perf_counter() - began:.1f} s"

    def _put_in_place(self, partial: Path, target: Path) -> None:
        # A folder cannot replace another in one step. Between the two renames the old one is found under its other name.
        if target.exists():
            replaced = target.with_name(target.name + REPLACED)
            remove(replaced)
            target.rename(replaced)
        partial.rename(target)
        files.sync(self._folder)
        files.sync(self._run)
        found = [path for path in checkpoints(self._run) if not path.name.endswith(REPLACED)]
        kept = found[found.index(target) :][: self._keep_last]
        for other in self._folder.iterdir():
            if other not in kept:
                remove(other)

    def _run_on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Runs ``action`` on every rank and returns what each returned; a failure of one is a failure of all.

        Raises:
            WriteFailed: a file could not be written, on any rank.
        """
        value, told = None, None
        failure: BaseException | None = None
        try:
            value = action()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            told = _disk_error(error)
            if told is None:
                failure, told = error, f"{type(error).__name__}: {error}"
        if self._group is None:
            outcomes = [(value, told, failure is None)]
        else:
            outcomes = [None] * self._parallel.world_size  # type: ignore[list-item]
            dist.all_gather_object(outcomes, (value, told, failure is None), group=self._group)
        if failure is not None:
            raise failure
        for _, reason, is_disk in outcomes:
            if reason is not None and not is_disk:
                raise RuntimeError(f"another rank failed while saving: {reason}")
        for _, reason, _ in outcomes:
            if reason is not None:
                raise WriteFailed(reason)
        return [each for each, _, _ in outcomes]


def _copied(value: Any) -> Any:
    """In host memory, apart from the original."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _disk_error(error: BaseException | None) -> str | None:
    """What the disk said, if an error comes from there. torch's writers wrap it, or lose all but their own words."""
    if isinstance(error, CheckpointException):
        reasons = [_disk_error(inner[0]) for inner in error.failures.values()]
        return None if any(reason is None for reason in reasons) else next(iter(reasons), None)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen.strerror or str(seen)
        seen = seen.__cause__ or seen.__context__
    return "a file could not be written to its end" if files.is_disk_error(error) else None
