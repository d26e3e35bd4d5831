"""A training program that waits between blocks of optimizer steps, so that several can alternate on one machine.

The program runs unchanged in a process of its own, or in one process for each rank. torch calls a hook after every optimizer step; the
hook counts, and at the end of a block it reports what the block took and waits for the next one. With many ranks rank 0 reads and
reports; the others wait for it in a collective.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.operators import seconds_by_group

PIPE_IN, PIPE_OUT = "FINCH_BENCHMARK_IN", "FINCH_BENCHMARK_OUT"
"""Environment variables of rank 0: file descriptors that a program reads blocks from, and writes a line of JSON for each to."""


class FlopsOfFirstStep:
    """Counts the operations of the first optimizer step, from the first call of any module on."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self._hook = register_module_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self._hook.remove()
        self._counter.__enter__()

    def end(self) -> int:
        self._counter.__exit__(None, None, None)
        return self._counter.get_total_flops()


class Blocks:
    """Counts optimizer steps; the first block begins after the warm-up.

    Args:
        commands: each line is a block, ``{"steps": int, "profile": bool}``; None on ranks above 0.
        reports: a line is written now, when the program is ready, and one after each block; None on ranks above 0.
        flops: of the first step.
    """

    def __init__(self, commands: TextIO | None, reports: TextIO | None, flops: int) -> None:
        self._commands, self._reports = commands, reports
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._left = 0
        self._profile: profile | None = None
        self._write({"flops": flops})
        self._start()

    def after_step(self, *_: Any) -> None:
        self._left -= 1
        if self._left:
            return
        if self._ranks > 1:
            dist.barrier()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        groups = None
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            groups = seconds_by_group(self._profile.events() or [])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._write({"wall_s": wall, "cpu_s": cpu, "groups_s": groups, "peak_memory_bytes": peak})
        self._start()

    def _write(self, report: dict[str, Any]) -> None:
        """CPU time and FLOPs are sums over ranks, memory is the largest rank's, the rest is rank 0's."""
        if self._ranks > 1:
            all_reports: list[Any] = [None] * self._ranks
            dist.all_gather_object(all_reports, report)
            merge: dict[str, Callable[[Iterable[Any]], Any]] = {"cpu_s": sum, "flops": sum, "peak_memory_bytes": max}
            report = {
                key: merge[key](each[key] for each in all_reports) if key in merge else value
                for key, value in report.items()
            }
        if self._reports is not None:
            self._reports.write(json.dumps(report) + "\n")
            self._reports.flush()

    def _start(self) -> None:
        """Waits for the next block."""
        line = [self._commands.readline() if self._commands is not None else ""]
        if self._ranks > 1:
            dist.broadcast_object_list(line)
        if not line[0]:
            os._exit(0)  # the benchmark has ended, the program has not
        command = json.loads(line[0])
        self._left, self._profile = command["steps"], None
        if command["profile"]:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.__enter__()
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def run_in_blocks(program: Callable[[], Any]) -> None:
    """Runs a program whose optimizer steps are the benchmark's; called in the contender's process, on each of its ranks."""
    is_first_rank = PIPE_IN in os.environ
    commands = os.fdopen(int(os.environ[PIPE_IN]), "r") if is_first_rank else None
    reports = os.fdopen(int(os.environ[PIPE_OUT]), "w") if is_first_rank else None
    flops, blocks = FlopsOfFirstStep(), list[Blocks]()

    def after_step(*_: Any) -> None:
        if blocks:
            blocks[0].after_step()
        else:  # the first step has paid for imports, allocations and kernels: it is in no block
            blocks.append(Blocks(commands, reports, flops.end()))

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
