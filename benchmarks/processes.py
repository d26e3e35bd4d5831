"""What benchmarks share: functions in separate processes, the machine in words, lines of a table."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import finch
from finch.distributed.processes import num_cores
from finch.plan.gpu_check.processes import free_port


class Ranks:
    """A function in separate processes, one per rank, with a pipe to each.

    Args:
        function: called as ``function(connection, *arguments)``; picklable.
        ranks: with more than one each process finds torchrun's variables.
        threads: of each rank; None: its share of the cores, at least one.
        log: file for what the processes print.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, log: Path, ranks: int = 1, threads: int | None = None
    ) -> None:
        self._log = log
        context = multiprocessing.get_context("spawn")
        variables = {"OMP_NUM_THREADS": str(threads or max(1, num_cores() // ranks))}
        if ranks > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            variables |= {**address, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, log, function, arguments))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            with mock.patch.dict(os.environ, {**variables, **own}):
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        atexit.register(self.close)  # after an error, before multiprocessing waits for processes that wait for us

    def send(self, message: Any) -> None:
        """Sends the same to all ranks."""
        for connection in self._connections:
            connection.send(message)

    def receive(self) -> list[Any]:
        """What each rank sends next.

        Raises:
            SystemExit: a rank has ended; with the end of the log.
        """
        try:
            return [connection.recv() for connection in self._connections]
        except EOFError:
            sys.exit(f"{self._log.stem} has ended:\n{self._log.read_text(errors='replace')[-2000:]}")

    def close(self) -> None:
        """Ends the processes: to them the pipe is at its end."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()


def _run(connection: Connection, log: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(connection, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not waiting for other ranks, which may have ended


def machine() -> str:
    """Versions and cores, for the first line of a benchmark's output."""
    versions = f"finch {finch.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}, {platform.system()} on {num_cores()} cores"


def rotated(items: Sequence[Any], number: int) -> list[Any]:
    """The items from another one on in each round, so that none always follows the same other one."""
    start = number % len(items)
    return [*items[start:], *items[:start]]


def alternate(
    runs: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each run in each round; each round begins with another one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in rotated([*runs], number):
            start = clock()
            runs[name]()
            times[name].append(clock() - start)
    return times


def print_times(times: Mapping[str, Sequence[float]]) -> None:
    """The median of each over the rounds and its range, in seconds and as a share of the first one's seconds in the same round."""
    (first, of_first), *_ = times.items()
    shares = {name: [value / whole for value, whole in zip(times[name], of_first, strict=True)] for name in times}
    columns = {"seconds, median (range)": times, f"of {first}": shares}
    print_rows([{"": name, **{title: spread(each[name]) for title, each in columns.items()}} for name in times])


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with the keys as titles; numbers with three digits or more."""
    lines = [[*rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    for line in lines:
        print("".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
