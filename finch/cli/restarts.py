"""When torchrun's agent starts the ranks again, and from where."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from finch.base import run_files
from finch.base.errors import HANG
from finch.checkpoint.reader import list_checkpoints
from finch.distributed.watchdog import REQUEUE_SIGNALS


class FinchAgent(LocalElasticAgent):
    """Starts the ranks of ``run`` again from its newest checkpoint, and says which one failed and why.

    Not after a user's mistake (``error_file`` exists) or a signal that ends a run, nor twice from the same checkpoint.
    """

    def __init__(self, *args: Any, run: Path, error_file: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run, self._error_file, self._arguments = run, error_file, self._worker_group.spec.args
        self._found, self._had_metrics = _newest(run), (run / run_files.METRICS).exists()
        # Equal to no checkpoint and not None, which stands for the beginning: a first failure is never the second one.
        self._failed_from: Any = self

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # With the checkpoint found at first still the newest, the arguments hold: they may resume from or overwrite it.
        if _newest(self._run) != self._found:
            # Appended, since the last value of a key counts: the user's overwrite=True would remove the checkpoint.
            worker_group.spec.args = (*self._arguments, "resume_from_checkpoint=auto", "overwrite=False")
        elif not self._had_metrics:  # those of lost steps would make the folder another run's
            (self._run / run_files.METRICS).unlink(missing_ok=True)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result, limit = super()._monitor_workers(worker_group), worker_group.spec.max_restarts
        if not result.is_failed():
            return result
        (rank, code), newest = failed_rank(ChildFailedError("", result.failures)), _newest(self._run)
        start = "the beginning" if newest is None else newest[0].name
        is_mistake, is_second = self._error_file.exists(), newest == self._failed_from
        if is_mistake or is_second or code - 128 in (*REQUEUE_SIGNALS, signal.SIGINT):
            # torchrun's loop, which calls this, starts the ranks again while the number is above 0.
            self._remaining_restarts = 0
        self._failed_from, text = newest, f"rank {rank} failed with exit code {code}{_reason(code)}"
        if left := self._remaining_restarts:
            print(f"finch: {text}; restart {limit - left + 1} of {limit}, from {start}", file=sys.stderr, flush=True)
        elif not is_mistake and code != 128 + signal.SIGINT:
            end = f"; not started a third time from {start}" if is_second else ""
            print(f"finch: error: {text}{end}", file=sys.stderr, flush=True)
        return result


def failed_rank(error: ChildFailedError) -> tuple[int, int]:
    """The first rank that failed, and its exit code as a shell has it: 128 + the signal's number after a signal."""
    rank, failure = error.get_first_failure()
    return rank, failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _newest(run: Path) -> tuple[Path, int] | None:
    """The newest complete checkpoint, and when it was completed."""
    return next(((path, path.stat().st_mtime_ns) for path in list_checkpoints(run)), None)


def _reason(code: int) -> str:
    if code == HANG:
        return " (a hang): no progress for distributed_timeout; the stacks are above"
    if code == 128 + signal.SIGKILL:
        return " (SIGKILL): often the machine has run out of memory; `finch check` estimates what a run needs"
    return f" ({signal.Signals(code - 128).name})" if code > 128 else "; its error is above"
