"""Training programs that wait between blocks of optimizer steps, so that several alternate on one machine, and a table of them.

A program runs unchanged in separate processes, one per rank. torch calls a hook after every optimizer step. At the end of a block it
reports what the block took and waits for the next one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.processes import Ranks, num_cores, print_rows, rotated
from benchmarks.speed.contenders import Lengths
from finch.plan.gpu_check.rates import matmul_rate

RESAMPLES = 10_000
BLOCK_S = 2.0


class Block(NamedTuple):
    """
    Attributes:
        operators: of a profiled block: the names of each operator and of those it runs inside, innermost first, and its own seconds.
    """

    seconds: float
    peak_memory_bytes: int
    operators: list[tuple[list[str], float]]


def _blocks(connection: Connection) -> Iterator[None]:
    """In a program's process; goes on after each optimizer step. The first step pays for imports, allocations and kernels: it is in no
    block."""
    flops = FlopCounterMode(display=False)

    def count_flops(*_: Any) -> None:
        hook.remove()
        flops.__enter__()

    hook = register_module_forward_pre_hook(count_flops)
    yield
    flops.__exit__(None, None, None)
    connection.send(flops.get_total_flops())
    while True:
        try:
            steps, is_profiled = connection.recv()
        except EOFError:
            os._exit(0)  # the benchmark has ended, the program has not
        with profile(activities=[ProfilerActivity.CPU]) if is_profiled else contextlib.nullcontext() as profiled:
            start = time.perf_counter()
            for _ in range(steps):
                yield
            seconds = time.perf_counter() - start
        events = (profiled.events() if profiled is not None else None) or ()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send(Block(seconds, peak, [(_names(each), each.self_cpu_time_total / 1e6) for each in events]))


def _names(event: Any) -> list[str]:
    return [] if event is None else [event.name, *_names(event.cpu_parent)]


def run_in_blocks(connection: Connection, program: Callable[[Any], None], settings: Any) -> None:
    """Runs a program whose optimizer steps are the benchmark's; called in the program's process, on each of its ranks."""
    logging.disable(logging.WARNING)
    blocks = _blocks(connection)
    next(blocks)
    register_optimizer_step_post_hook(lambda *_: next(blocks))
    program(settings)


class Contender(Ranks):
    """A training program between two blocks of steps, once it has taken its first step.

    Args:
        name: of its files in ``folder``.
        program: trains until its process is ended; takes ``settings``, to which the place of its output is added as ``out``.
        folder: created if missing.
        options: of :class:`Ranks`.

    Attributes:
        flops: of the first step, on all ranks.

    Raises:
        SystemExit: the program has ended, as for :meth:`run`.
    """

    def __init__(
        self, name: str, program: Callable[..., None], settings: Mapping[str, Any], folder: Path, **options: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        settings = {**settings, "out": str(folder / name)}
        super().__init__(run_in_blocks, program, settings, log=folder / f"{name}.log", **options)
        self.flops = sum(self.receive())

    def run(self, steps: int, *, is_profiled: bool = False) -> Block:
        """A block of steps: the seconds of the slowest rank, the memory of the largest, the operators of rank 0 if profiled, which slows
        the block down."""
        self.send((steps, is_profiled))
        seconds, peaks, operators = zip(*self.receive(), strict=True)
        return Block(max(seconds), max(peaks), operators[0])


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], work: Any) -> tuple[float, float, float]:
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


class Case(NamedTuple):
    """A contender and the steps of its epoch; the other attributes are those of :class:`Contender`."""

    name: str
    program: Callable[..., None]
    settings: dict[str, Any]
    lengths: Lengths
    ranks: int = 1
    threads: int | None = None


def print_table(
    title: str, cases: Sequence[Case], folder: Path, blocks: int, steps: int | None = None, seconds: float = math.inf
) -> None:
    """Runs the cases in turns and prints a line of each: time per target token over that of the first with a 95% bootstrap interval over
    blocks, and the rate of the needed FLOPs over the rate of matrix products at the model's shapes, measured between the blocks.

    Args:
        blocks: of each case.
        steps: of a block; needed is what the first case computes. None: as many as take BLOCK_S, at least one, within the epoch; needed is
            what each case computes.
        seconds: after which no further round of blocks begins; at least two are run.
    """
    start = time.monotonic()
    runs = [Contender(*case[:3], folder / title, ranks=case.ranks, threads=case.threads) for case in cases]
    first = 1 if steps else 2  # steps before the blocks
    counts = [
        steps or max(1, min(int(BLOCK_S / run.run(1).seconds), (len(case.lengths.tokens) - first) // blocks))
        for run, case in zip(runs, cases, strict=True)
    ]
    measured: list[list[Block]] = [[] for _ in cases]
    rates: list[list[float]] = [[] for _ in cases]
    for number in range(blocks):
        round_start = time.monotonic()
        for index in rotated(range(len(cases)), number):
            case = cases[index]
            measured[index].append(runs[index].run(counts[index]))
            if steps is None or index == 0:
                torch.set_num_threads(min(num_cores(), case.ranks * (case.threads or num_cores())))
                rates[index].append(matmul_rate(round(_mean(case.lengths.tokens)), case.settings["shapes"]))
        if number and 2 * time.monotonic() - round_start > start + seconds:
            break
    done = len(measured[0])
    print(f"\n{title}; {done} blocks of {', '.join(map(str, sorted({*counts})))} steps")

    def of_blocks(index: int, values: list[int]) -> list[int]:
        """Sums over the steps of each block."""
        return [sum(values[first + counts[index] * number :][: counts[index]]) for number in range(done)]

    tokens = [of_blocks(index, case.lengths.tokens) for index, case in enumerate(cases)]
    targets = [of_blocks(index, case.lengths.targets) for index, case in enumerate(cases)]
    times = [[block.seconds for block in each] for each in measured]
    rows = []
    for index, (case, run) in enumerate(zip(cases, runs, strict=True)):
        run.close()
        base = index if steps is None else 0
        rate = sum(targets[index]) / sum(times[index])
        needed = runs[base].flops / cases[base].lengths.tokens[0] * sum(tokens[base]) / sum(targets[base]) * rate
        ratio, low, high = ratio_interval(times[0], times[index], (targets[0], targets[index]))
        row = {
            "": case.name,
            "step, s": _mean(times[index]) / counts[index],
            "tokens/s": sum(tokens[index]) / sum(times[index]),
            "targets/s": rate,
            "time per target": f"{ratio:.2f} x [{low:.2f}, {high:.2f}]",
            "TFLOP": run.flops / 1e12,
            "GFLOP/s": needed / 1e9,
            "of matmul": needed / _mean(rates[base]),
            "matmul GFLOP/s": _mean(rates[base]) / 1e9,
            "peak MB": max(block.peak_memory_bytes for block in measured[index]) / 1e6,
        }
        rows.append(row)
    print_rows(rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
