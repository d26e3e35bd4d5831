"""Preemption: SIGTERM, SIGUSR1 and Ctrl-C end a run after the current step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from finch.distributed import watchdog
from finch.distributed.parallel import is_launched

_REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A launcher forwards its signals. Where one reaches the whole process tree, as Slurm's does, a rank receives it twice.
_DUPLICATE_WINDOW_S = 3.0


class Signals:
    """Records the signals of this rank.

    The first one ends the run after the step; a second one ends the process at once, with 128 + its number. ``before_training`` is called at
    SIGTERM or SIGUSR1 before ``start``; it must be quick, the process then exits with 0.
    """

    def __init__(self, before_training: Callable[[], None] | None = None) -> None:
        self._before_training = before_training
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
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    @property
    def is_terminated(self) -> bool:
        """Whether SIGTERM or SIGUSR1 has come: the run should be started again."""
        return bool(self._received & set(_REQUEUE_SIGNALS))

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C has come."""
        return signal.SIGINT in self._received

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
