"""All processes of one start of a job, orphans included, found by a variable in their environment."""

from __future__ import annotations

import contextlib
import random
import time

import psutil

VARIABLE = "FINCH_TORTURE"


def members(tag: str) -> list[psutil.Process]:
    """The living processes that were started with ``VARIABLE=tag``, in the order of their start."""
    processes = []
    for process in psutil.process_iter():
        # It may have ended meanwhile, be a zombie, or another user's.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(VARIABLE) == tag:
                processes.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(processes, key=lambda each: each[:2])]


def kill_all(tag: str, rng: random.Random) -> None:
    """Kills them in a random order, and what they have started meanwhile, until none is left."""
    while living := members(tag):
        rng.shuffle(living)
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()


def wait_until_gone(tag: str, seconds: float) -> list[psutil.Process]:
    """Returns the processes that are still alive after ``seconds``."""
    end = time.monotonic() + seconds
    while (living := members(tag)) and time.monotonic() < end:
        time.sleep(0.05)
    return living
