"""A table of contenders that alternate: speed, share of the rate of matrix products, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.processes import num_cores, print_row, rotated
from benchmarks.speed.blocks import Block, Contender, matmul_rate, ratio_interval, start_all
from benchmarks.speed.rows import Lengths

BLOCK_S = 2.0


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
    runs = [Contender(*case[:3], folder / title, ranks=case.ranks, threads=case.threads) for case in cases]
    start = time.monotonic()
    start_all(runs)
    first, counts = 1, [steps or 0] * len(cases)
    if steps is None:
        first = 2
        for index, (run, case) in enumerate(zip(runs, cases, strict=True)):
            possible = int(BLOCK_S / run.run(1).seconds)
            counts[index] = max(1, min(possible, (len(case.lengths.tokens) - first) // blocks))
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
    print(f"\n{title}; {done} blocks of {' '.join(map(str, sorted({*counts})))} steps")

    def of_blocks(index: int, values: list[int]) -> list[int]:
        """Sums over the steps of each block."""
        return [sum(values[first + counts[index] * number :][: counts[index]]) for number in range(done)]

    tokens = [of_blocks(index, case.lengths.tokens) for index, case in enumerate(cases)]
    targets = [of_blocks(index, case.lengths.targets) for index, case in enumerate(cases)]
    times = [[block.seconds for block in each] for each in measured]
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
        print_row(row, has_header=index == 0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
