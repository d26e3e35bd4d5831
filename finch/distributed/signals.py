"""Preemption: SIGTERM, SIGUSR1 and Ctrl-C end a run after the current step, the same one on every rank."""

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

_REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A launcher forwards its signals. Where one reaches the whole process tree, as Slurm's does, a rank receives it twice.
_DUPLICATE_WINDOW_S = 3.0


@dataclass(frozen=True)
class SignalDecision:
    """What all ranks do after a step.

    Attributes:
        save: save the state.
        stop: save the state and end the run.
        requeue: the run should be started again: it received SIGTERM or SIGUSR1.
    """

    save: bool = False
    stop: bool = False
    requeue: bool = False


class Signals:
    """Records signals; once a step all ranks agree on what to do about them.

    The first signal ends the run after the step; a second one ends the process at once, with 128 + its number.

    Args:
        parallel: the ranks; with several, one all-reduce of three numbers on the host per step.
        timeout_s: seconds after which a rank that does not answer is an error.
        before_training: called at SIGTERM or SIGUSR1 before ``start``; must be quick, the process then exits with 0.
    """

    def __init__(
        self, parallel: Parallel, *, timeout_s: float = 1800.0, before_training: Callable[[], None] | None = None
    ) -> None:
        self._before_training = before_training
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if parallel.world_size > 1 else None
        )
        self._received: set[int] = set()
        self._first_time = 0.0
        self._is_training = False
        self._pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Handles SIGTERM and SIGUSR1. A no-op outside of the main thread, where Python allows no handlers."""
        self._install(*_REQUEUE_SIGNALS)

    def start(self) -> None:
        """From here on a signal waits for the end of the step; Ctrl-C is handled too."""
        self._install(*_REQUEUE_SIGNALS, signal.SIGINT)
        self._is_training = True

    def restore(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def sync(self, is_save_due: bool) -> SignalDecision:
        """What to do after this step; a collective.

        Args:
            is_save_due: whether this rank should save; if one should, all do.
        """
        is_terminated = bool(self._received & set(_REQUEUE_SIGNALS))
        is_interrupted = signal.SIGINT in self._received
        if self._group is not None:
            flags = torch.tensor([is_save_due, is_terminated, is_interrupted], dtype=torch.int32)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
            is_save_due, is_terminated, is_interrupted = (bool(flag) for flag in flags.tolist())
        return SignalDecision(is_save_due, is_terminated or is_interrupted, is_terminated)

    def _install(self, *numbers: int) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._previous_handlers.setdefault(number, signal.signal(number, self._handle))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process inherits this handler
            return
        if not self._is_training:
            if self._before_training is not None:
                self._before_training()
            os._exit(0)
        if watchdog.is_stuck():  # the step will not end
            os._exit(128 + number)
        if not self._received:
            self._first_time = time.monotonic()
        elif not is_launched() or time.monotonic() - self._first_time > _DUPLICATE_WINDOW_S:
            os._exit(128 + number)
        self._received.add(number)
