"""What processes share with those that started them: the cores, and their end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import MutableMapping

_PR_SET_PDEATHSIG = 1
_SPIN_COUNT = "1000"


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Lets OpenMP's threads sleep soon while they wait for each other. What the user has set stays. Takes effect where torch is not imported yet.

    GNU OpenMP's threads spin up to 300,000 times at a barrier. Where another process has taken the core of one of them, the others then spin
    for as long as that process runs: next to other work a small model's step takes twenty times its time and more. 1,000 times is OpenMP's
    own number where it has more threads than cores. With free cores a small model's step then takes about 15% longer; with
    OMP_WAIT_POLICY=PASSIVE it takes twice as long.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def share_cores(environment: MutableMapping[str, str], processes: int) -> None:
    """Gives each of several processes on this machine its share of the cores as OpenMP's threads. What the user has set stays."""
    limit_spinning(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // processes)))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent() -> None:
    """Has this process killed when its parent ends, however that happens. Linux only; a no-op elsewhere.

    The system does not report a parent that ended before this call, while a rank was still importing. Such a rank exits here:
    it would otherwise wait for its launcher's store, which is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Asked by ranks alone: the parent of a DataLoader's worker is its rank, not the launcher.
        if multiprocessing.parent_process() is None and _launcher_is_gone():
            print("finch: the launcher of this rank has ended; the rank exits", file=sys.stderr, flush=True)
            os._exit(1)


def _launcher_is_gone() -> bool:
    """Whether torchrun's store, which is open before the first rank starts, refuses connections; False where that is unknown."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10).close()
    except ConnectionRefusedError:
        return True
    # A time-out, or an address that is missing or not resolved, says nothing about the launcher.
    except (OSError, KeyError, ValueError):
        pass
    return False


def init_loader_worker(worker_id: int) -> None:
    """DataLoader's ``worker_init_fn``. The worker ignores signals to the whole process tree: the trainer handles them, and needs
    the worker to finish its step. It obeys the trainer's own SIGTERM, which multiprocessing sends when the trainer exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A handler in Python is not told who has sent a signal; sigwaitinfo is.
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the thread below receives it
        threading.Thread(target=_exit_at_sigterm_of, args=(os.getppid(),), daemon=True).start()
    die_with_parent()


def _exit_at_sigterm_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    # sys.exit would end this thread alone.
    os._exit(128 + signal.SIGTERM)
