"""Contenders as processes that take turns, and the ratios of their times with an interval."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.blocks import PIPE_IN, PIPE_OUT

RESAMPLES = 10_000
PROGRAM = ("-m", "benchmarks.speed.contenders")
AT_ONCE = 2  # contenders that start together: the first step of all of them would not fit into memory


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Contender:
    """A training program in processes of its own, one a rank, between two blocks of steps.

    Args:
        name: the first argument of the program.
        settings: the second one, as JSON.
        log: file for what it prints.
        ranks: processes.
        threads: of each rank; None: its share of the cores, at least one.
        program: what follows python on the command line.

    Attributes:
        flops: of the first step, on all ranks; 0 before it.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        log: Path,
        *,
        ranks: int = 1,
        threads: int | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.name, self.ranks = name, ranks
        self._threads = threads or max(1, num_cores() // ranks)
        self._arguments = [sys.executable, *program, name, json.dumps(settings)]
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_ready = False
        self.flops = 0

    def start(self) -> None:
        """Starts the program and does not wait for it."""
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        if self.ranks > 1:
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
            }
        for rank in range(self.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            pipes = {PIPE_IN: str(commands), PIPE_OUT: str(reports)} if rank == 0 else {}
            with self._log.open("a") as file:
                process = subprocess.Popen(
                    self._arguments,
                    env={**environment, **own, **pipes},
                    pass_fds=(commands, reports) if rank == 0 else (),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self._processes.append(process)
        os.close(commands)
        os.close(reports)
        self._reader = os.fdopen(self._reports)

    def wait_until_ready(self) -> None:
        """Waits for the end of the first step.

        Raises:
            SystemExit: the program has ended.
        """
        if not self._is_ready:
            self.flops = self._read()["flops"]
            self._is_ready = True

    def run(self, steps: int, *, is_profiled: bool = False) -> dict[str, Any]:
        """A block of steps.

        Args:
            is_profiled: whether to measure the time of each group of operators, which slows the block down.

        Returns:
            wall_s, cpu_s and peak_memory_bytes; groups_s is None unless profiled.

        Raises:
            SystemExit: the program has ended.
        """
        os.write(self._commands, json.dumps({"steps": steps, "profile": is_profiled}).encode() + b"\n")
        return self._read()

    def close(self) -> None:
        """Ends the program."""
        os.close(self._commands)
        self._reader.close()
        for process in self._processes:
            process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._reader.readline()
        if not line:
            sys.exit(f"{self.name} has ended:\n{self._log.read_text(errors='replace')[-2000:]}")
        report: dict[str, Any] = json.loads(line)
        return report


def start_all(contenders: Sequence[Contender]) -> None:
    """Starts the programs, a few at once, and waits for their first steps."""
    for number, one in enumerate(contenders):
        if number >= AT_ONCE:
            contenders[number - AT_ONCE].wait_until_ready()
        one.start()
    for one in contenders:
        one.wait_until_ready()


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], work: tuple[Sequence[float], Sequence[float]] | None = None
) -> tuple[float, float, float]:
    """Their time divided by ours over paired blocks: the ratio of the sums, and its 95% bootstrap interval over blocks.

    Args:
        ours, theirs: seconds of each block.
        work: target tokens of each of our blocks and of theirs, where they differ.
    """
    seconds = np.array([ours, theirs])
    tokens = np.ones_like(seconds) if work is None else np.array(work)
    draws = np.random.default_rng(0).integers(seconds.shape[1], size=(RESAMPLES, seconds.shape[1]))

    def ratios(blocks: Any) -> Any:
        one, other = seconds[:, blocks].sum(-1) / tokens[:, blocks].sum(-1)
        return other / one

    low, high = np.quantile(ratios(draws), (0.025, 0.975))
    return float(ratios(slice(None))), float(low), float(high)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
