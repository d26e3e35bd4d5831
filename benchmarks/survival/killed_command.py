"""Kills a run, an average, an evaluation or a sweep at random instants, continues it until it ends, and compares it with an undisturbed one."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.survival.cases import Case, environment
from benchmarks.survival.killed_run import (
    EXIT_TIMEOUT_S,
    MAX_KILLS,
    MAX_TRIES,
    SHARE_OF_KILLS_AT_START,
    SIGTERM,
    SLOW_EXIT_TIMEOUT_S,
    TAG,
    kill_all,
    wait_until_gone,
)

KINDS = {"tree": 14, "launcher": 3, SIGTERM: 3}
"""What is killed, with weights: all processes, the command's own process; SIGTERM is sent to the latter."""


class KilledCommand:
    """
    Attributes:
        start_s, work_s: of an undisturbed start: until it has written something, and from there to its end.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._seed = case, seed
        case.reset()
        before, start = _entries(case.job), time.monotonic()
        with self._started(0) as process:
            while process.poll() is None and _entries(case.job) <= before:
                time.sleep(0.05)
            self.start_s = time.monotonic() - start
            process.wait()
        self.work_s = time.monotonic() - start - self.start_s
        if process.returncode != 0:
            raise RuntimeError(f"undisturbed, it ended with {process.returncode}; {self._log(0)}")
        case.keep_reference()

    def survives(self, number: int) -> tuple[int, list[str]]:
        """Kills run ``number``, which decides with the seed on the kills, and continues it; how many kills it had, and what is wrong."""
        rng = random.Random(f"{self._seed} {self._case.name} {number}")
        for tries in range(MAX_TRIES):  # it may end before its kill, where the machine is faster now
            self._case.reset()
            kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=rng.randint(1, MAX_KILLS))
            kills, failures = self._run(kinds, rng, 0.7**tries)
            if kills or failures:
                return kills, failures or self._case.differences()
        return 0, [f"it ended {MAX_TRIES} times before its kill"]

    def _run(self, kinds: Sequence[str], rng: random.Random, scale: float) -> tuple[int, list[str]]:
        for attempt, kind in enumerate(kinds):
            with self._started(attempt) as process:
                at_start, fraction = rng.random() < SHARE_OF_KILLS_AT_START, rng.random()
                seconds = fraction * self.start_s if at_start else self.start_s + fraction * self.work_s
                seconds *= scale
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return attempt, self._failures(attempt, process.wait(seconds))
                if kind == "tree":
                    kill_all(str(self._case.job))
                else:
                    process.send_signal(signal.SIGTERM if kind == SIGTERM else signal.SIGKILL)
                # A process that still imports has not yet asked the system to be killed with its parent.
                seconds = EXIT_TIMEOUT_S if kind == "tree" else SLOW_EXIT_TIMEOUT_S
                if survivors := wait_until_gone(str(self._case.job), seconds):
                    return attempt + 1, [f"{kind} left process {survivors[0].pid} behind"]
        with self._started(len(kinds)) as process:
            return len(kinds), self._failures(len(kinds), process.wait())

    def _failures(self, attempt: int, code: int) -> list[str]:
        return [] if code == 0 else [f"attempt {attempt} ended with {code}; {self._log(attempt)}"]

    @contextlib.contextmanager
    def _started(self, attempt: int) -> Iterator[subprocess.Popen[bytes]]:
        tag = str(self._case.job)
        with self._log(attempt).open("wb") as log:
            process = subprocess.Popen(
                self._case.command(),
                env={**environment(), TAG: tag},
                stdout=log,
                stderr=log,
                cwd=self._case.out,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill_all(tag)
            process.wait()

    def _log(self, attempt: int) -> Path:
        return self._case.out / f"attempt_{attempt}.log"


def _entries(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.name != ".lock"}


def main(out: Path, cases: Sequence[type[Case]], seed: int, numbers: Sequence[int]) -> list[str]:
    """Prints a line for each run; returns the failures."""
    failures = []
    for each in cases:
        killed = KilledCommand(each(out), seed)
        print(f"{each.name}: {killed.start_s:.0f} s until it writes, then {killed.work_s:.0f} s", flush=True)
        kills = 0
        for number in numbers:
            some, wrong = killed.survives(number)
            kills += some
            failures += [f"{each.name}, run {number}: {problem}" for problem in wrong[:1]]
            print(f"{each.name} {number}: {some} kills; {wrong[0] if wrong else 'survived'}", flush=True)
        survived = len(numbers) - sum(line.startswith(f"{each.name},") for line in failures)
        print(f"kills, {each.name}: {survived} / {len(numbers)} survived; {kills} kills", flush=True)
    return failures
