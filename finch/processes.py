"""What becomes of a process when the one that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """This process is killed when its parent ends, however that ends; on Linux alone, and a no-op elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_loader_worker(worker_id: int) -> None:
    """For DataLoader's ``worker_init_fn``. A signal to the whole process tree is the trainer's to answer: it still needs
    this worker to finish its step. SIGTERM of the trainer itself ends it, as multiprocessing does when the trainer ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the thread below to take
        threading.Thread(target=_end_for, args=(os.getppid(),), daemon=True).start()
    die_with_parent()


def _end_for(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)
