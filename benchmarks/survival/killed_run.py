"""One run of a two-process job that is killed at random instants and started again until it is done."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.survival import process_tree
from benchmarks.survival.phases import END, START, phases_file
from finch.run_files import METRICS, read_metrics

ROOT = Path(__file__).parents[2]
RECIPE = "benchmarks.survival.slowed_recipe"
SIGTERM = "SIGTERM"
# What is killed, and how often: all processes, the launcher, one rank; SIGTERM asks the launcher to leave in good order.
KINDS = {"tree": 13, "launcher": 3, "rank": 2, SIGTERM: 2}
SHARE_OF_KILLS_IN_THE_START = 0.15
ATTEMPT_LIMIT_S = 240.0
PATIENCE_S = 15.0  # for processes that end with their launcher
# For ranks that have lost a peer, that were asked to leave and finish what they are doing, or that are still importing: until they
# have asked the system to be killed with their launcher they do not see its end.
LEAVING_S = 90.0


@dataclass(frozen=True)
class Job:
    """Attributes:
    config: the file that the recipe takes.
    run: the run's folder, as in the config.
    recipe: the module that torchrun starts.
    """

    config: Path
    run: Path
    recipe: str = RECIPE

    @property
    def mark(self) -> str:
        return str(self.run)

    def log(self, attempt: int) -> Path:
        return self.run.with_name(f"{self.run.name}.{attempt}.log")

    def start(self, attempt: int) -> subprocess.Popen[bytes]:
        """Starts the launcher in a session of its own; the output of all its processes goes into ``log``."""
        phases_file(self.run).unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            process_tree.MARK: self.mark,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["-m", self.recipe, "--config", str(self.config), "resume_from_checkpoint=auto"]
        with self.log(attempt).open("wb") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.run.parent,
                start_new_session=True,
            )

    def phase(self) -> str:
        """What rank 0 is doing, or was doing last."""
        try:
            lines = phases_file(self.run).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return START
        return lines[-1] if lines else START

    def last_step(self) -> int:
        """The furthest step in metrics.jsonl."""
        file = self.run / METRICS
        return max((line["step"] for line in read_metrics(file)), default=0) if file.exists() else 0


@dataclass(frozen=True)
class Timing:
    """Seconds that an undisturbed run takes until its first step, and from there until its last save is done; and its steps."""

    start_s: float
    training_s: float
    steps: int


@dataclass(frozen=True)
class Kill:
    kind: str
    phase: str
    step: int

    @property
    def in_save(self) -> bool:
        return self.phase.startswith("save")

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} at {self.step}"


@dataclass
class Outcome:
    """Attributes:
    lost: for each start after a kill that came as far as its training, how many steps it has to take again.
    damaged: checkpoints that a start has found damaged; a kill may leave parts of one, but never a damaged whole.
    failures: what went wrong, in words; empty: the run has come to its end.
    """

    kills: list[Kill] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_undisturbed(job: Job) -> Timing:
    """
    Raises:
        RuntimeError: the job does not even run without kills.
    """
    began = time.monotonic()
    launcher = job.start(0)
    try:
        _wait(launcher, job, began + ATTEMPT_LIMIT_S, lambda phase: phase != START)
        first = time.monotonic()
        _wait(launcher, job, began + ATTEMPT_LIMIT_S, lambda phase: phase == END)
        last = time.monotonic()
        _wait(launcher, job, began + ATTEMPT_LIMIT_S)
    finally:
        process_tree.kill_all(job.mark, random.Random(0))
    if launcher.wait() != 0:
        raise RuntimeError(f"the undisturbed run failed: {_tail(job.log(0))}")
    return Timing(first - began, last - first, job.last_step())


def run_killed(job: Job, timing: Timing, kinds: Sequence[str], drawn: random.Random, most_lost: int) -> Outcome:
    """Starts the job again after each of the kills, and then lets it come to its end.

    Args:
        kinds: of the kills, see ``KINDS``, in their order.
        drawn: decides on the instants.
        most_lost: steps that a kill may cost; more is a failure.
    """
    outcome, began = Outcome(), time.monotonic()
    for attempt in range(1, len(kinds) + 2):
        kind = kinds[attempt - 1] if attempt <= len(kinds) else None
        furthest = job.last_step()
        launcher = job.start(attempt)
        try:
            kill = _attempt(launcher, job, timing, kind, drawn)
            is_ended = kill is None or kill.kind == "tree" or (kill.kind == "launcher" and kill.phase != START)
            left = process_tree.wait_until_gone(job.mark, PATIENCE_S if is_ended else LEAVING_S)
        finally:
            process_tree.kill_all(job.mark, drawn)
        code = launcher.wait()
        outcome.failures += [f"attempt {attempt} left process {process.pid} behind" for process in left]
        _note_resume(outcome, job, attempt, furthest, most_lost)
        if kill is not None:
            outcome.kills.append(kill)
        elif code != 0:
            outcome.failures.append(f"attempt {attempt} ended with {code}: {_tail(job.log(attempt))}")
        if outcome.failures or (kill is None and code == 0):
            break
    outcome.seconds = time.monotonic() - began
    return outcome


def _attempt(
    launcher: subprocess.Popen[bytes], job: Job, timing: Timing, kind: str | None, drawn: random.Random
) -> Kill | None:
    """Waits for the instant and kills; None: the job has come to its end before, or was not to be killed."""
    now = time.monotonic()
    limit = now + ATTEMPT_LIMIT_S
    in_start = drawn.random() < SHARE_OF_KILLS_IN_THE_START
    place = drawn.random()
    if kind is None:
        _wait(launcher, job, limit)
        return None
    if in_start:
        instant = now + place * timing.start_s
    else:
        _wait(launcher, job, limit, lambda phase: phase != START)
        # What is left of the training; a kill after its end would be none.
        instant = time.monotonic() + place * timing.training_s * (1 - job.last_step() / timing.steps)
    if not _wait(launcher, job, min(instant, limit)):
        return None
    ranks = [process for process in psutil.Process(launcher.pid).children() if job.recipe in " ".join(_words(process))]
    if kind == SIGTERM:
        phase = job.phase()
        launcher.send_signal(signal.SIGTERM)
    elif kind == "launcher":
        launcher.kill()
        phase = job.phase()
    elif kind == "rank" and ranks:
        phase = job.phase()
        drawn.choice(ranks).kill()
    else:
        kind = "tree"
        process_tree.kill_all(job.mark, drawn)
        phase = job.phase()
    return Kill(kind, phase, job.last_step())


def _wait(
    launcher: subprocess.Popen[bytes], job: Job, until: float, is_reached: Callable[[str], bool] = lambda phase: False
) -> bool:
    """Waits for an instant, or for a phase; returns whether the launcher still runs then."""
    while launcher.poll() is None and time.monotonic() < until and not is_reached(job.phase()):
        time.sleep(0.002)
    return launcher.poll() is None


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _note_resume(outcome: Outcome, job: Job, attempt: int, furthest: int, most_lost: int) -> None:
    """Reads from the attempt's output where it has gone on."""
    text = job.log(attempt).read_text(encoding="utf-8", errors="replace")
    outcome.damaged += re.findall(r"\S+ is damaged \(.*\)", text)
    resumed = re.search(r"resumed from step (\d+) of", text)
    if attempt == 1 or (resumed is None and job.phase() == START):
        return
    lost = furthest - (int(resumed[1]) if resumed else 0)
    outcome.lost.append(lost)
    last = outcome.kills[-1]
    allowed = 0 if last.kind == SIGTERM and last.phase != START else most_lost
    if lost > allowed:
        outcome.failures.append(f"attempt {attempt} goes on {lost} steps back, more than {allowed}, after {last}")


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:])
