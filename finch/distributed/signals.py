"""Leaving in good order: SIGTERM, SIGUSR1 and Ctrl-C end a run after the step it is in, on every rank after the same one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from finch.distributed import watchdog
from finch.distributed.parallel import Parallel, is_launched

_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A launcher hands on what it gets. Where a signal reaches the whole process tree, as Slurm's does, a rank sees it twice.
_SAME_SIGNAL_S = 3.0


@dataclass(frozen=True)
class SignalDecision:
    """What the ranks have agreed to do after a step.

    Attributes:
        save: save the state.
        stop: save the state, and end; it is set with one of the two below.
        requeue: the run is to be started again: SIGTERM or SIGUSR1 has come.
    """

    save: bool = False
    stop: bool = False
    requeue: bool = False


class Signals:
    """Takes signals and lets all ranks agree on what to do about them, once a step.

    The first signal is noted; a second one ends the process at once, with 128 + its number.

    Args:
        parallel: the ranks that agree; with several, one all-reduce of three numbers on the host a step.
        timeout_s: seconds after which a rank that does not answer is an error.
        before_training: called for SIGTERM and SIGUSR1 until ``start``; must be quick, the process ends after it with 0.
    """

    def __init__(
        self, parallel: Parallel, *, timeout_s: float = 1800.0, before_training: Callable[[], None] | None = None
    ) -> None:
        self._parallel, self._before_training = parallel, before_training
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if parallel.world_size > 1 else None
        )
        self._noted: set[int] = set()
        self._first = 0.0
        self._is_training = False
        self._process = os.getpid()
        self._former: dict[int, Any] = {}

    def install(self) -> None:
        """Takes SIGTERM and SIGUSR1. Does nothing outside of the main thread, where Python takes none."""
        self._take(signal.SIGTERM, signal.SIGUSR1)

    def start(self) -> None:
        """From here on a signal waits for the step's end; Ctrl-C is taken too."""
        self._take(*_CAUGHT)
        self._is_training = True

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def sync(self, is_due: bool) -> SignalDecision:
        """What to do after this step; a collective.

        Args:
            is_due: whether this rank finds that the state should be saved; one is enough.
        """
        terminated = bool(self._noted & {signal.SIGTERM, signal.SIGUSR1})
        interrupted = signal.SIGINT in self._noted
        if self._group is not None:
            flags = torch.tensor([is_due, terminated, interrupted], dtype=torch.int32)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
            is_due, terminated, interrupted = (bool(flag) for flag in flags.tolist())
        return SignalDecision(is_due, terminated or interrupted, terminated)

    def _take(self, *numbers: int) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                former = signal.signal(number, self._note)
                self._former.setdefault(number, former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process inherits this handler
            return
        if not self._is_training:
            if self._before_training is not None:
                self._before_training()
            os._exit(0)
        if watchdog.is_stuck():  # the step will not end
            os._exit(128 + number)
        if not self._noted:
            self._first = time.monotonic()
        elif not is_launched() or time.monotonic() - self._first > _SAME_SIGNAL_S:
            os._exit(128 + number)
        self._noted.add(number)
