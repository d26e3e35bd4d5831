"""All processes that one start has brought about, orphans included, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import random
import time

import psutil

MARK = "FINCH_TORTURE"


def members(mark: str) -> list[psutil.Process]:
    """The processes that live and were started with ``MARK=mark``, in the order of their start."""
    found = []
    for process in psutil.process_iter():
        # A process that ends meanwhile, a zombie, or another user's
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(found, key=lambda each: each[:2])]


def kill_all(mark: str, drawn: random.Random) -> None:
    """Kills them in a random order, and what they have started meanwhile, until there is none."""
    while living := members(mark):
        drawn.shuffle(living)
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()


def wait_until_gone(mark: str, seconds: float) -> list[psutil.Process]:
    """Returns the processes that are still there after ``seconds``."""
    end = time.monotonic() + seconds
    while (living := members(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return living
