"""A training program that waits between blocks of optimizer steps, so that several can alternate on one machine.

The program runs unchanged in a process of its own. torch calls a hook after every optimizer step; the hook counts, and at the end of a
block it reports what the block took and waits for the next one.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

PIPE_IN, PIPE_OUT = "FINCH_BENCHMARK_IN", "FINCH_BENCHMARK_OUT"
"""Environment variables: file descriptors that a program reads the number of steps from, and writes a line of JSON to."""


class Blocks:
    """Counts optimizer steps; the first block ends with the warm-up."""

    def __init__(self, commands: TextIO, reports: TextIO) -> None:
        self._commands, self._reports = commands, reports
        self._left = 0
        self._counter: FlopCounterMode | None = None
        self._start()

    def after_step(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            flops = None
            if self._counter is not None:
                self._counter.__exit__(None, None, None)
                flops = self._counter.get_total_flops()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            report = {"wall_s": wall, "cpu_s": cpu, "flops": flops, "peak_memory_bytes": peak}
            self._reports.write(json.dumps(report) + "\n")
            self._reports.flush()
            self._start()

    def _start(self) -> None:
        """Waits for the next block."""
        line = self._commands.readline()
        if not line:
            os._exit(0)  # the benchmark has ended, the program has not
        command = json.loads(line)
        self._left = command["steps"]
        self._counter = None
        if command["count_flops"]:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def run_in_blocks(program: Callable[[], Any]) -> None:
    """Runs a program whose optimizer steps are the benchmark's; called in the contender's process."""
    commands = os.fdopen(int(os.environ[PIPE_IN]), "r")
    reports = os.fdopen(int(os.environ[PIPE_OUT]), "w")
    blocks: list[Blocks] = []

    def after_step(*_: Any) -> None:
        if blocks:
            blocks[0].after_step()
        else:  # the first step has paid for imports, allocations and kernels: it is in no block
            blocks.append(Blocks(commands, reports))

    register_optimizer_step_post_hook(after_step)
    with _stdout_to_stderr():
        program()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
