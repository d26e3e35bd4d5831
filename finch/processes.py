"""What becomes of a process when the one that started it ends."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """This process is killed when its parent ends, however that ends; on Linux alone, and a no-op elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_loader_worker(worker_id: int) -> None:
    """For DataLoader's ``worker_init_fn``. A signal to the whole process tree is the trainer's to answer: it still needs
    this worker to finish its step."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
