"""Contenders as processes that take turns, and the ratios of their times with an interval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.blocks import PIPE_IN, PIPE_OUT

RESAMPLES = 10_000


class Contender:
    """A training program in a process of its own, between two blocks of steps.

    Args:
        name: of ``benchmarks.speed.contenders.CONTENDERS``.
        settings: its argument.
        log: file for what it prints.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], log: Path) -> None:
        self.name, self.blocks = name, list[dict[str, Any]]()
        self._log = log
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        environment = {**os.environ, PIPE_IN: str(commands), PIPE_OUT: str(reports)}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.speed.contenders", name, json.dumps(settings)],
                env=environment,
                pass_fds=(commands, reports),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        os.close(commands)
        os.close(reports)
        self._reader = os.fdopen(self._reports)

    def run(self, steps: int, *, count_flops: bool = False) -> dict[str, Any]:
        """A block of steps; returns wall_s, cpu_s, flops (None unless counted) and peak_memory_bytes.

        Raises:
            SystemExit: the program has ended.
        """
        os.write(self._commands, json.dumps({"steps": steps, "count_flops": count_flops}).encode() + b"\n")
        line = self._reader.readline()
        if not line:
            sys.exit(f"{self.name} has ended:\n{self._log.read_text()[-2000:]}")
        block: dict[str, Any] = json.loads(line)
        return block

    def close(self) -> None:
        os.close(self._commands)
        self._reader.close()
        self._process.wait()


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Their time divided by ours over paired blocks: the ratio of the sums, and its 95% bootstrap interval over blocks."""
    one, other = np.array(ours), np.array(theirs)
    draws = np.random.default_rng(0).integers(len(one), size=(RESAMPLES, len(one)))
    low, high = np.quantile(other[draws].sum(1) / one[draws].sum(1), (0.025, 0.975))
    return float(other.sum() / one.sum()), float(low), float(high)
