"""Functions in processes of their own, one or several ranks, that are ended at a deadline with their stacks."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from finch.base.log import quiet_dependencies
from finch.distributed.processes import die_with_parent, share_cores

_POLL_S = 0.05
_GRACE_S = 5.0  # to print stacks; for the other ranks, after one has failed
_ABORTED = "Fatal Python error: Aborted"  # what faulthandler prints before the stacks
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class Ranks:
    """A function in one or several processes.

    Args:
        target: ``"module:function"``.
        arguments: its keyword arguments, plain JSON.
        folder: for logs, ``NAME.log`` of one process, ``NAME_rank_N.log`` of several.
        ranks: with more than one each process finds torchrun's variables.
        leads: whether the processes form a process group of their own, which :meth:`end` ends with all that they have started.
    """

    def __init__(
        self, name: str, target: str, arguments: dict[str, Any], folder: Path, *, ranks: int = 1, leads: bool = False
    ) -> None:
        command = [sys.executable, "-P", "-m", "finch.plan.gpu_check.processes", target, json.dumps(arguments)]
        environment = environment_of(ranks)
        self._logs = [folder / (f"{name}.log" if ranks == 1 else f"{name}_rank_{rank}.log") for rank in range(ranks)]
        self._leads = leads
        self.processes = []
        for rank, log in enumerate(self._logs):
            own = {} if ranks == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("ab") as output:
                started = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environment, **own},
                    start_new_session=leads,
                )
            self.processes.append(started)

    def wait(self, end: float) -> bool:
        """Waits until all processes have ended; the first that fails ends the others. Returns False if ``end``, by ``time.time()``, came first."""
        while any(process.poll() is None for process in self.processes):
            if any(process.returncode for process in self.processes):  # None: it runs
                self._wait_until(min(end, time.time() + _GRACE_S))
                self.kill()
            if time.time() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def abort(self) -> None:
        """Ends the processes; those of Python print the stacks of their threads before."""
        if self._leads:  # first what they have started, which dies with them and might not finish its stacks
            for process in self.processes:
                _abort_children(process.pid)
        self._signal(signal.SIGABRT)
        self._wait_until(time.time() + _GRACE_S)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    @property
    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def last_lines(self, number: int = 3) -> str:
        """The end of what the first failed process has printed."""
        codes = self.codes
        index = next((index for index, code in enumerate(codes) if code and code > 0), 0)
        text = self._logs[index].read_text(encoding="utf-8", errors="replace").strip()
        return " / ".join(text.splitlines()[-number:])

    def _wait_until(self, end: float) -> None:
        while any(process.poll() is None for process in self.processes) and time.time() < end:
            time.sleep(_POLL_S)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if self._leads:  # also after its leader has ended
                    os.killpg(process.pid, number)
                elif process.poll() is None:
                    process.send_signal(number)


def _abort_children(process: int) -> None:
    end = time.time() + _GRACE_S
    with contextlib.suppress(OSError):  # one has ended by itself
        listed = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children")]
        children = [os.pidfd_open(int(child)) for children in listed for child in children]
        for child in children:
            signal.pidfd_send_signal(child, signal.SIGABRT)
        for child in children:
            select.select([child], [], [], max(0.0, end - time.time()))
            os.close(child)


def environment_of(ranks: int = 1) -> dict[str, str]:
    """The environment of processes that form a group of ``ranks``, or none; nothing is downloaded."""
    environment = {key: value for key, value in os.environ.items() if key not in _TORCHRUN}
    share_cores(environment, ranks)
    environment |= {"PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return environment


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def stacks_in(folder: Path) -> str:
    """The stacks that processes have printed into their logs when they were aborted."""
    found = []
    for log in sorted(folder.rglob("*.log")):
        _, is_aborted, stacks = log.read_text(encoding="utf-8", errors="replace").partition(_ABORTED)
        if is_aborted:
            found.append(f"{log.stem}:{stacks.rstrip()}")
    return "\n\n".join(found)


def main() -> None:
    """A process of :class:`Ranks`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a process that is aborted
    die_with_parent()
    quiet_dependencies()
    pkgutil.resolve_name(sys.argv[1])(**json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's and NCCL's teardown could wait for ranks that have ended


if __name__ == "__main__":
    main()
