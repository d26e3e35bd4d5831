"""Training programs that wait between blocks of optimizer steps, so that several alternate on one machine.

A program runs unchanged in separate processes, one per rank. torch calls a hook after every optimizer step. At the end of a block it
reports what the block took and waits for the next one.
"""

from __future__ import annotations

import contextlib
import logging
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

from benchmarks.processes import Ranks

RESAMPLES = 10_000
AT_ONCE = 2  # programs that start together: the first step of all of them would not fit into memory


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


class Contender:
    """A training program between two blocks of steps.

    Args:
        name: of its files in ``folder``.
        program: trains until its process is ended; takes ``settings``, to which the place of its output is added as ``out``.
        folder: created if missing.
        ranks, threads: of :class:`Ranks`.

    Attributes:
        flops: of the first step, on all ranks; 0 before it.
    """

    def __init__(
        self,
        name: str,
        program: Callable[..., None],
        settings: Mapping[str, Any],
        folder: Path,
        *,
        ranks: int = 1,
        threads: int | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        arguments = run_in_blocks, program, {**settings, "out": str(folder / name)}
        self._start = lambda: Ranks(*arguments, log=folder / f"{name}.log", ranks=ranks, threads=threads)
        self.flops = 0

    def start(self) -> None:
        """Starts the program and does not wait for it."""
        self._ranks = self._start()

    def wait_until_ready(self) -> None:
        """Waits for the end of the first step. Raises SystemExit if the program has ended, as does :meth:`run`."""
        if not self.flops:
            self.flops = sum(self._ranks.receive())

    def run(self, steps: int, *, is_profiled: bool = False) -> Block:
        """A block of steps: the seconds of the slowest rank, the memory of the largest, the operators of rank 0 if profiled, which slows
        the block down."""
        self._ranks.send((steps, is_profiled))
        seconds, peaks, operators = zip(*self._ranks.receive(), strict=True)
        return Block(max(seconds), max(peaks), operators[0])

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


def matmul_rate(tokens: int, shapes: Sequence[tuple[int, int]], seconds: float = 0.5) -> float:
    """FLOP per second of fp32 products of [tokens, inputs] with [inputs, outputs], all ``shapes`` in turn.

    Args:
        shapes: (inputs, outputs) of the model's linear layers.
    """
    pairs = [(torch.randn(tokens, inputs), torch.randn(inputs, outputs)) for inputs, outputs in shapes]

    def products() -> None:
        for one, other in pairs:
            one @ other

    products()
    rounds, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        products()
        rounds += 1
    return rounds * sum(2 * tokens * inputs * outputs for inputs, outputs in shapes) / elapsed
