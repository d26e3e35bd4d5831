"""A rank that hangs, and one that is to end: a watchdog prints the stack of every thread of a rank that makes no progress, shortly before
collectives time out; SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C end a run after the current step or the next.

One stuck rank makes all others wait, and the first of them to time out ends the job. Only the stacks of all ranks show who waits
for whom.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from finch.base.errors import HANG, is_restarted
from finch.distributed.processes import is_launched

_SHARE_OF_TIMEOUT = 0.9
_GRACE_S = 5.0  # for the watching thread to print, if it gets to run
_POLL_S = 1.0
_STDERR = 2  # the descriptor: sys.stderr may have been replaced, by a progress bar for one
REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# A launcher forwards its signals. Where one reaches the whole process tree, as Slurm's does, a rank receives it twice; a closed terminal's
# comes from the shell and from the system.
_DUPLICATE_WINDOW_S = 3.0


class Watchdog:
    """Prints the stacks once :meth:`heartbeat` has not been called for nine tenths of the collectives' timeout. Only where the ranks are started
    again does it end the process, after all of it."""

    def __init__(self, timeout_s: float) -> None:
        self._limit_s, self._timeout_s = _SHARE_OF_TIMEOUT * timeout_s, timeout_s
        self._stopped = threading.Event()
        self.in_step = False
        self.has_fired = False
        self.heartbeat()
        threading.Thread(target=self._watch, name="finch-watchdog", daemon=True).start()

    def heartbeat(self) -> None:
        """This rank makes progress."""
        self._last_heartbeat, self.has_fired = time.monotonic(), False
        # The interpreter's own watchdog needs no interpreter lock: it also prints where a call into C blocks the thread below.
        faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, exit=is_restarted(), file=_STDERR)

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stopped.wait(max(self._last_heartbeat + self._limit_s - time.monotonic(), _POLL_S)):
            idle_s = time.monotonic() - self._last_heartbeat
            if self.has_fired and idle_s >= self._timeout_s and is_restarted():
                os._exit(HANG)
            if self.has_fired or idle_s < self._limit_s:
                continue
            self.has_fired = True
            # Else the interpreter's watchdog would print the same stacks once more.
            faulthandler.cancel_dump_traceback_later()
            os.write(_STDERR, self._stacks())

    def _stacks(self) -> bytes:
        """The stacks in one piece: faulthandler writes word by word, and the output of ranks that share a terminal would be mixed."""
        rank = os.environ.get("RANK", "0")
        line = f"\nfinch: rank {rank} has made no progress for {self._limit_s:.0f} s; its stacks:\n"
        # In memory if possible: the disk may be what hangs.
        with (
            open(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as file
        ):
            faulthandler.dump_traceback(file=file.fileno(), all_threads=True)
            file.seek(0)
            return line.encode() + file.read()


_watchdog: Watchdog | None = None


def start(timeout_s: float) -> None:
    global _watchdog
    stop()
    _watchdog = Watchdog(timeout_s)


def heartbeat() -> None:
    """This rank makes progress: called at each batch of a pass and after whatever takes long. A no-op without a watchdog."""
    if _watchdog is not None:
        _watchdog.heartbeat()


def mark_step(is_inside: bool) -> None:
    """Called before and after each training step. A no-op without a watchdog."""
    if _watchdog is not None:
        _watchdog.heartbeat()
        _watchdog.in_step = is_inside


def is_stuck() -> bool:
    """Whether this rank is in a step and its stacks have been printed."""
    return _watchdog is not None and _watchdog.in_step and _watchdog.has_fired


def stop() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None


class Signals:
    """Records the signals of this rank.

    The first one ends the run after the step; a second one ends the process at once, with 128 + its number. ``before_training`` is called at
    ``REQUEUE_SIGNALS`` before ``start`` and after ``end``; it must be quick, the process then exits with 0.
    """

    def __init__(self, before_training: Callable[[], None] | None = None) -> None:
        self._before_training = before_training
        self._received: set[int] = set()
        self._first_time = 0.0
        self._is_training = False
        self._pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Handles ``REQUEUE_SIGNALS``. A no-op outside of the main thread, where Python allows no handlers."""
        self._install(*REQUEUE_SIGNALS)

    def start(self) -> None:
        """From here on a signal waits for the end of the step; Ctrl-C is handled too."""
        self._install(*REQUEUE_SIGNALS, signal.SIGINT)
        self._is_training = True

    def end(self) -> None:
        """From here on a signal ends the process at once, as before ``start``."""
        self._is_training = False
        if threading.current_thread() is threading.main_thread() and signal.SIGINT in self._previous_handlers:
            signal.signal(signal.SIGINT, self._previous_handlers.pop(signal.SIGINT))

    def restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    @property
    def is_terminated(self) -> bool:
        """Whether one of ``REQUEUE_SIGNALS`` has come: the run should be started again."""
        return bool(self._received & set(REQUEUE_SIGNALS))

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C has come."""
        return signal.SIGINT in self._received

    def _install(self, *numbers: int) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup
                self._previous_handlers.setdefault(number, signal.signal(number, self._handle))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process inherits this handler
            return
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._is_training:
            if self._before_training is not None:
                self._before_training()
            os._exit(0)
        if is_stuck():  # the step will not end
            os._exit(128 + number)
        if not self._received:
            self._first_time = time.monotonic()
            if os.environ.get("RANK", "0") == "0":  # at once: a step may take a minute; print is not safe in a handler
                os.write(2, b"\nfinch: saving after this step or the next; once more ends the run without saving\n")
        elif not (is_launched() or number == signal.SIGHUP) or self._is_late():
            os._exit(128 + number)
        self._received.add(number)

    def _is_late(self) -> bool:
        return time.monotonic() - self._first_time > _DUPLICATE_WINDOW_S


def _leave_terminal() -> None:
    """A closed terminal refuses what is written to it, which would end the run."""
    for descriptor in (1, _STDERR):
        # A terminal is a character device; output into a file or a pipe goes on.
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
