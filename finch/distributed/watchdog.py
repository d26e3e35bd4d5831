"""Where a rank is when it does not get on: the stack of every thread, a little before collectives give up waiting.

One rank that is stuck makes all others wait, and the first of them to give up ends the job. Only the stacks of all ranks
tell who waits for whom.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Iterator

_EARLIER = 0.9
_GRACE_S = 5.0  # for the watching thread to print its line, if it gets to run
_PAUSE_S = 1.0
_STDERR = 2  # the descriptor: whatever sys.stderr has become, a progress bar included


class Watchdog:
    """Prints where every thread is once :meth:`heartbeat` has not been called for a while; ends nothing.

    Args:
        timeout_s: after which a collective fails; the stacks come at nine tenths of it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._limit = _EARLIER * timeout_s
        self._is_over = threading.Event()
        self._in_step = False
        self._has_told = False
        self.heartbeat()
        threading.Thread(target=self._watch, name="finch-watchdog", daemon=True).start()

    def heartbeat(self) -> None:
        """Says that this rank gets on."""
        self._last, self._has_told = time.monotonic(), False
        # The interpreter's own watchdog needs no lock of it: it speaks also where a call into C keeps the thread below from running.
        faulthandler.dump_traceback_later(self._limit + _GRACE_S, exit=False, file=_STDERR)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step."""
        self.heartbeat()
        self._in_step = True
        yield
        self._in_step = False
        self.heartbeat()

    @property
    def is_stuck(self) -> bool:
        """Whether this rank is in a step and has been found not to get on."""
        return self._in_step and self._has_told

    def stop(self) -> None:
        self._is_over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._is_over.wait(max(self._last + self._limit - time.monotonic(), _PAUSE_S)):
            if self._has_told or time.monotonic() < self._last + self._limit:
                continue
            self._has_told = True
            faulthandler.cancel_dump_traceback_later()
            os.write(_STDERR, self._stacks())

    def _stacks(self) -> bytes:
        """In one piece: faulthandler itself writes word by word, and ranks that share a terminal would mix theirs."""
        line = f"\nfinch: rank {os.environ.get('RANK', '0')} has not got on for {self._limit:.0f} s; it is here:\n"
        # Not on a disk, which may be what hangs.
        with (
            open(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as file
        ):
            faulthandler.dump_traceback(file=file.fileno(), all_threads=True)
            file.seek(0)
            return line.encode() + file.read()


_watchdog: Watchdog | None = None


def start(timeout_s: float) -> None:
    """Starts this process's watchdog."""
    global _watchdog
    stop()
    _watchdog = Watchdog(timeout_s)


def heartbeat() -> None:
    """Says that this rank gets on, at each batch of a pass and after whatever takes long; nothing without a watchdog."""
    if _watchdog is not None:
        _watchdog.heartbeat()


def step() -> contextlib.AbstractContextManager[None]:
    """Around a training step; nothing without a watchdog."""
    return contextlib.nullcontext() if _watchdog is None else _watchdog.step()


def is_stuck() -> bool:
    """Whether this rank is in a step and has been found not to get on."""
    return _watchdog is not None and _watchdog.is_stuck


def stop() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None
