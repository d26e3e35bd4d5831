"""Functions in processes of their own, one or several ranks, that are ended at a deadline with their stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pkgutil
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from finch.base.log import quiet_dependencies
from finch.distributed.processes import die_with_parent, share_cores
from finch.plan.gpu_check.report import Late

_POLL_S = 0.05
_GRACE_S = 5.0  # for the other ranks, after one has failed
_STACKS_S = 2.0  # to print stacks
_STACKS = re.compile(r"^(Current t|T)hread 0x.*", re.MULTILINE | re.DOTALL)  # as faulthandler prints them
_OF_LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|LOCAL_\w+|GROUP_\w+|ROLE_\w+|MASTER_\w+|TORCHELASTIC_\w+")


class Ranks:
    """A function in one or several processes, which download nothing.

    Args:
        target: ``"module:function"``.
        arguments: its keyword arguments, plain JSON.
        folder: for logs, ``NAME.log`` of one process, ``NAME_rank_N.log`` of several.
        ranks: with more than one each process finds torchrun's variables.
        leads: whether the processes are ended with all that they have started.

    Attributes:
        is_late: whether they were ended at a deadline, and not after one had failed.
    """

    def __init__(
        self, name: str, target: str, arguments: dict[str, Any], folder: Path, *, ranks: int = 1, leads: bool = False
    ) -> None:
        command = [sys.executable, "-P", "-m", "finch.plan.gpu_check.processes", target, json.dumps(arguments)]
        self._logs = [folder / (f"{name}.log" if ranks == 1 else f"{name}_rank_{rank}.log") for rank in range(ranks)]
        self._leads, self._processes, self.is_late = leads, [], False
        # These processes do not join the ranks that this one may belong to.
        environment = {key: value for key, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(key)}
        environment |= {"PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["HF_HUB_OFFLINE"] = "1"
        share_cores(environment, ranks)
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank, log in enumerate(self._logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            with log.open("ab") as output:
                options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                options |= {"env": {**environment, **own}, "start_new_session": leads}
                self._processes.append(subprocess.Popen(command, **options))

    def wait(self, end: float) -> bool:
        """Waits until all processes have ended. What still runs at ``end``, by ``time.time()``, or some seconds after one has failed, prints the
        stacks of its threads and is ended. Returns whether all have ended by themselves."""
        try:
            while None in self.codes:
                if any(self.codes):
                    end = min(end, time.time() + _GRACE_S)
                if time.time() > end:
                    self.is_late = not any(self.codes)
                    self._signal(signal.SIGQUIT)
                    time.sleep(_STACKS_S)
                    return False
                time.sleep(_POLL_S)
            return True
        finally:
            self._signal(signal.SIGKILL)
            for process in self._processes:
                process.wait()

    def finish(self, end: float) -> None:
        """As :meth:`wait`. Raises Late if they were ended at the deadline."""
        self.wait(end)
        if self.is_late:
            raise Late

    @property
    def codes(self) -> list[int | None]:
        """Exit codes; None: it runs."""
        return [process.poll() for process in self._processes]

    def last_lines(self, number: int = 3) -> str:
        """The end of what the first failed process has printed."""
        index = next((index for index, code in enumerate(self.codes) if code and code > 0), 0)
        text = self._logs[index].read_text(encoding="utf-8", errors="replace").strip()
        return " / ".join(text.splitlines()[-number:])

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if self._leads:  # also after its leader has ended
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)


def power_of_two(ranks: int) -> int:
    """The largest power of two up to ``ranks``: over so many the rows are dealt evenly."""
    return 1 << (ranks.bit_length() - 1)


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def stacks_in(folder: Path) -> str:
    """The stacks that processes have printed into their logs when they were ended."""
    logs = {log.stem: log.read_text(encoding="utf-8", errors="replace") for log in sorted(folder.rglob("*.log"))}
    return "\n\n".join(
        f"{name}:\n{found[0].rstrip()}" for name, text in logs.items() if (found := _STACKS.search(text))
    )


def main() -> None:
    """A process of :class:`Ranks`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a process that is ended by a signal
    faulthandler.register(signal.SIGQUIT)
    die_with_parent()
    quiet_dependencies()
    pkgutil.resolve_name(sys.argv[1])(**json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's and NCCL's teardown could wait for ranks that have ended


if __name__ == "__main__":
    main()
