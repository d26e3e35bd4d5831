"""What becomes of a process when the one that started it ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """This process is killed when its parent ends, however that ends; on Linux alone, and a no-op elsewhere.

    A parent that has ended before, while a rank was still importing, is not noticed by the system. The rank ends itself then:
    it would go on to wait for its launcher's store, which is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if multiprocessing.parent_process() is None and _launcher_is_gone():
            print("finch: the launcher of this rank has ended, and so does the rank", file=sys.stderr, flush=True)
            os._exit(1)


def _launcher_is_gone() -> bool:
    """Whether torchrun's store, which opens before the first rank starts, takes no connections; False where that is not known."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):
        pass
    return False


def init_loader_worker(worker_id: int) -> None:
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
