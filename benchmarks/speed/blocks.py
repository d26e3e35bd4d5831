"""Training programs that wait between blocks of optimizer steps, so that several alternate on one machine.

A program runs unchanged in separate processes, one per rank. torch calls a hook after every optimizer step. It counts, and at the end of
a block it reports what the block took and waits for the next one.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.processes import Ranks

RESAMPLES = 10_000
AT_ONCE = 2  # programs that start together: the first step of all of them would not fit into memory


class _Blocks:
    """Counts optimizer steps in a program's process. The first step pays for imports, allocations and kernels: it is in no block."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 1
        self._profile: profile | None = None
        self._flops: FlopCounterMode | None = FlopCounterMode(display=False)
        self._hook = register_module_forward_pre_hook(self._count_flops)
        register_optimizer_step_post_hook(self._after_step)

    def _count_flops(self, *_: Any) -> None:
        self._hook.remove()
        assert self._flops is not None
        self._flops.__enter__()

    def _after_step(self, *_: Any) -> None:
        self._left -= 1
        if self._left:
            return
        if self._flops is not None:
            self._flops.__exit__(None, None, None)
            self._connection.send(self._flops.get_total_flops())
            self._flops = None
        else:
            self._report()
        try:
            self._left, is_profiled = self._connection.recv()
        except EOFError:
            os._exit(0)  # the benchmark has ended, the program has not
        self._profile = profile(activities=[ProfilerActivity.CPU]).__enter__() if is_profiled else None
        self._start = time.perf_counter()

    def _report(self) -> None:
        seconds, operators = time.perf_counter() - self._start, []
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            operators = [(_names(each), each.self_cpu_time_total / 1e6) for each in self._profile.events() or ()]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._connection.send({"seconds": seconds, "peak_memory_bytes": peak, "operators": operators})


def _names(event: Any) -> list[str]:
    """The operator's name, then those of the operators it runs inside, innermost first."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def run_in_blocks(connection: Connection, program: Callable[[Any], None], settings: Any) -> None:
    """Runs a program whose optimizer steps are the benchmark's; called in the program's process, on each of its ranks."""
    logging.disable(logging.WARNING)
    _Blocks(connection)
    program(settings)


class Contender:
    """A training program between two blocks of steps.

    Args:
        program: trains until its process is ended; takes ``settings``.
        log: file for what it prints.
        ranks, threads: of :class:`Ranks`.

    Attributes:
        flops: of the first step, on all ranks; 0 before it.
    """

    def __init__(
        self,
        program: Callable[[Any], None],
        settings: Mapping[str, Any],
        log: Path,
        *,
        ranks: int = 1,
        threads: int | None = None,
    ) -> None:
        self._start = lambda: Ranks(run_in_blocks, program, settings, log=log, ranks=ranks, threads=threads)
        self.flops = 0

    def start(self) -> None:
        """Starts the program and does not wait for it."""
        self._ranks = self._start()

    def wait_until_ready(self) -> None:
        """Waits for the end of the first step.

        Raises:
            SystemExit: the program has ended.
        """
        if not self.flops:
            self.flops = sum(self._ranks.receive())

    def run(self, steps: int, *, is_profiled: bool = False) -> dict[str, Any]:
        """A block of steps.

        Returns:
            ``seconds`` of the slowest rank, ``peak_memory_bytes`` of the largest; ``operators`` of rank 0 if profiled, which slows the
            block down: the names of each operator and of those around it, and its own seconds.

        Raises:
            SystemExit: the program has ended.
        """
        self._ranks.send((steps, is_profiled))
        reports = self._ranks.receive()
        largest = {key: max(report[key] for report in reports) for key in ("seconds", "peak_memory_bytes")}
        return {**largest, "operators": reports[0]["operators"]}

    def close(self) -> None:
        """Ends the program."""
        self._ranks.close()


def start_all(contenders: Sequence[Contender]) -> None:
    """Starts the programs, a few at once, and waits for their first steps."""
    for number, one in enumerate(contenders):
        if number >= AT_ONCE:
            contenders[number - AT_ONCE].wait_until_ready()
        one.start()
    for one in contenders:
        one.wait_until_ready()


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], work: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float, float]:
    """Their time per target token divided by ours over paired blocks: the ratio of the sums, and its 95% bootstrap interval over blocks.

    Args:
        ours, theirs: seconds of each block.
        work: target tokens of each of our blocks and of theirs.
    """
    seconds, tokens = np.array([ours, theirs]), np.array(work)
    draws = np.random.default_rng(0).integers(seconds.shape[1], size=(RESAMPLES, seconds.shape[1]))

    def ratios(blocks: Any) -> Any:
        one, other = seconds[:, blocks].sum(-1) / tokens[:, blocks].sum(-1)
        return other / one

    low, high = np.quantile(ratios(draws), (0.025, 0.975))
    return float(ratios(slice(None))), float(low), float(high)


def matmul_rate(tokens: int, shapes: Sequence[tuple[int, int]], seconds: float = 0.5) -> float:
    """FLOP per second of fp32 products of [tokens, inputs] with [inputs, outputs], all ``shapes`` in turn.

    Args:
        shapes: (inputs, outputs) of the model's linear layers.
    """
    pairs = [(torch.randn(tokens, inputs), torch.randn(inputs, outputs)) for inputs, outputs in shapes]
    for one, other in pairs:
        one @ other
    flops, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for one, other in pairs:
            one @ other
            flops += 2 * one.shape[0] * one.shape[1] * other.shape[1]
    return flops / elapsed
